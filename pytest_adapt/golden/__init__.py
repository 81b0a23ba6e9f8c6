"""Golden records: what the reference says about a prompt, how they are kept, reviewed and checked."""
