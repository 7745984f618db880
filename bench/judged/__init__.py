"""Problems and candidates, right, wrong and cheating, with the check that finds each."""
