"""What `vitkern doctor` finds on a machine: facts section by section, and what to mend.

`examine.examine()` gathers plain values, `findings.findings(facts)` judges them without looking at
the machine again, `page.page(facts, ...)` prints both.
"""
