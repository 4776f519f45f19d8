"""Which boundaries of a prompt are kept, and which kept state goes when room is needed."""
