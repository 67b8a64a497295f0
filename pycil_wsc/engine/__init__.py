"""What the training loop stands on: phases, schedules, precision, recorded passes, step cost, triggers."""
