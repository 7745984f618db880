"""NVIDIA machine code (SASS): read it, understand it, edit it, prove an edit legal."""
