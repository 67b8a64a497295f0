"""The continual-learning methods: each is a file in the folder of its family, and is found by the registry.

A base class that several methods of a family share is a file of its own: :mod:`.penalties.penalising`,
:mod:`.averaging.merging_learner`, :mod:`.distillation.distilling`, :mod:`.prompts.prompted`,
:mod:`.prototypes.prototypical` and :mod:`.closed_form.closed_form`.
Weight Space Consolidation on top of any of them is :mod:`.consolidation`.
"""
