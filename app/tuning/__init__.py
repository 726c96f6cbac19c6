"""The search for a recipe's best values: Optuna proposes and remembers, Ray Tune runs and prunes."""
