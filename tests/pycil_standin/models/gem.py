import a_solver_of_quadratic_programs  # noqa: F401  not installed
