"""The forward and backward pass of a step, alone or in several processes, its pace and its cost."""
