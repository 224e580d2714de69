"""What an API process knows of the names that requests may use beside the model's own. Imports no torch."""
