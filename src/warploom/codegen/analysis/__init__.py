"""Facts about a program or a block program that passes and the printer ask for."""
