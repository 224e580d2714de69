"""`frame doctor`: predicts what a checkpoint needs before anything is loaded."""
