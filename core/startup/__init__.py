"""What a process does before its work: it sets up logging and torch's threads, and lets platforms begin early."""
