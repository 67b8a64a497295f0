"""Components of the training loop: phases, schedules, precision, recorded passes, step cost, triggers."""
