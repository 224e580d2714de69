"""`frame route`: a front for several servers. It forwards requests and answers as they are, and knows no engine."""
