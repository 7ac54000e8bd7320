"""Programs around a run, and the libraries that they are made of.

Programs that run.sh calls:
    run.py       It starts this node's part of a run: bash run.sh [preset] [--knob value ...]
    help.py      It explains commands, presets and knobs: bash run.sh [preset] --help [WORD ...]
    status.py    It says what a run is doing, or where it stopped: bash run.sh status [out/toy]
    doctor.py    It checks that a configuration computes what it should, by two short runs:
                 bash run.sh doctor [preset] [--knob value ...]
    prepare.py   It makes or fetches the models of a run and checks its problems before anything
                 starts; run.py and evaluate.py call it through plumbing/placement.py.

Programs to be called by hand, in the environment that run.sh sets up:
    report.py    It sums up a run or compares several, with curves and a page to browse:
                 python tools/report.py [out/toy] [out/other ...]
    show.py      It prints the latest rollouts in colour: python tools/show.py [out/toy] [--n 5]
    evaluate.py  It measures a model on held-out problems: python tools/evaluate.py MODEL [--knob v]
    replay.py    It trains one step of a run again: python tools/replay.py out/toy --step 137
    memory.py    It estimates the GPU memory of a run: python tools/memory.py [preset] --gpus 8
    simulate.py  It predicts how fast a run would be with other knobs:
                 python tools/simulate.py out/toy --max_lag 4
                 Without a run it computes the throughput model of the PipelineRL paper.

Libraries:
    common.py             What several programs share: find a run, read its files, judge them.
    base_model.py         Tiny base models, warmed up on the demonstrations of a task.
    doctor_checks.py      The checks of the doctor, each of which gives rows of its table.
    doctor_reference.py   What a run should have computed, in the plainest way.
    simulate_run.py       The simulation of a run, event by event.
    report_panels.py      Curves as a picture and as a page.
    report_comparison.py  Several runs beside each other: settings, seeds, differences.
    report_page.html      The page, into which report_panels.py puts the data of a run.
"""
