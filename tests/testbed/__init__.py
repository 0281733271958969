"""Test hosts on one machine: real SSH, separate networks and separate shared memory. See `testbed.bed`."""
