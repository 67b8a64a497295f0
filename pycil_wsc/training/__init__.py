"""How a learner learns a task, whatever its method. To read a step, begin with :mod:`.loop`.

* :mod:`.learner`: what a method overrides, and how a task is learned
* :mod:`.loop`: the phases, epochs and steps of a task; :mod:`.phase`: what a method declares of a phase, and its run
* :mod:`.batches`, :mod:`.outputs`, :mod:`.over`, :mod:`.precision`: the four objects that hooks use
* :mod:`.plan`: what is known of a method before it has a network; :mod:`.learner_state`: the parts of its saved state
* :mod:`.step`: the forward and backward pass of a step, and what it costs
* :mod:`.learner_config`: the keys of training, which all learners read
* :mod:`.optimizers`, :mod:`.batch_norm`, :mod:`.budget`, :mod:`.processes`
"""
