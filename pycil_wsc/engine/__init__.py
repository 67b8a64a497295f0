"""Components of the training loop: phases, schedules, precision, passes, step cost, triggers."""
