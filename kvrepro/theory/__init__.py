"""The mathematics behind the rules, exact and slow: what the tests and notebooks hold the fast paths against."""
