"""What the training loop is built on: phases, schedules, precision, recorded passes, step cost, triggers."""
