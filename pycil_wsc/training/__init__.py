"""How a learner learns a task, whatever its method. To read a step, begin with :mod:`.loop`.

* :mod:`.learner`: what all methods share, and how a task is learned; :mod:`.hooks`: what a method overrides;
  :mod:`.toolbox`: what its hooks may use
* :mod:`.loop`: the phases, epochs and steps of a task; :mod:`.phase`: what a method declares of a phase
* :mod:`.step`: the forward and backward pass of a step, and what it costs
* :mod:`.options`, :mod:`.learner_config`: the keys of training and those that all learners read
* :mod:`.schedules`, :mod:`.optimizers`, :mod:`.precision`, :mod:`.batch_norm`, :mod:`.budget`, :mod:`.processes`
"""
