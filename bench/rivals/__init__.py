"""What the benches that set memfit beside others share: models to measure on (`subjects`), rivals (`techniques`), and how both are run and counted.

**A new rival is one file in `techniques/`**, found by being there. It has

    NAME      what the page calls it
    PACKAGE   the module it needs beside torch, or None; where it is missing the rival is reported as not installed
    INSTALL   what pip would be asked for, or None
    NOTE      one sentence for the page, may be empty
    obstacle(subject)   why it does not apply to this model, in words; None where it does
    settings(subject)   [(label, arrange), ...], where `arrange(subject, built)` changes the model in place as its users would and returns a function that
                        computes the loss once; backward and the optimizer's step are done by the bench

`arrange` gets a model of its own, so it may do with it what it likes.

**A new model is one entry in `subjects.SUBJECTS`.**
"""
