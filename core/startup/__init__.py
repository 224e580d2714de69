"""What a process does before its work: logging, how torch's threads wait, bytecode, what platforms begin early."""
