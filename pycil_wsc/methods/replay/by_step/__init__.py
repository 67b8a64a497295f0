"""Mammoth's methods whose steps draw from a memory that they fill; ER, DER++ and ER-ACE stand beside this folder."""
