"""Will it fit, what is sent, how long does a step take: answered without the devices."""
