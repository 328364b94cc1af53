"""The mathematics behind the rules, exact and slow: what the tests hold the fast paths against."""
