"""Trace + budget -> Plan. No torch: a plan for any machine can be made on any other."""
