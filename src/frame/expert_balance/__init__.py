"""Balance of experts: a policy places them by their loads, and their weights move between devices beside the steps."""
