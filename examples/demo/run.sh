#!/bin/sh
# A decoder learns to read 64 tokens, each rule makes them 256, and what that is worth is measured:
# before the model has trained under the rule, and after. Five minutes or so on two cores.
#
#     sh examples/demo/run.sh          from the top of the repository; `make demo` calls it
#
# Everything goes to demo/. However it is stopped, it goes on from there when it is called again.
set -eu
here=$(dirname "$0")
rules="none linear ntk dynamic yarn llama3"

run() {
    printf '\n$ armillary %s\n' "$*"
    armillary "$@"
}

is_measured() { [ -e "demo/results/$1/report.html" ]; }

measure() { # NAME MODEL LENGTHS: losses of the documents that nothing was trained on
    run evaluate "$2" --out "demo/results/$1" --tasks perplexity --text demo/base/data \
        --lengths "$3" --original-window 64 --reach 256 --windows 96
}

[ -e demo/base/model ] || run train "$here/base.yaml" --resume
is_measured base || measure base demo/base/model 64

before=""
for rule in $rules; do
    is_measured "$rule" || {
        run extend apply demo/base/model --to 256 --rule "$rule" --out "demo/$rule"
        measure "$rule" "demo/$rule" 64,128,256
    }
    before="$before demo/results/$rule"
done

# As many more steps at the old window: a rule has to beat them, not the model that had none.
[ -e demo/control/model ] || run train "$here/control.yaml" --resume
is_measured control || measure control demo/control/model 64

after=""
for rule in $rules; do
    is_measured "$rule-adapted" || {
        run extend apply demo/base/model --to 256 --rule "$rule" --out "demo/$rule-adapted" \
            --adapt "$here/adapt.yaml"
        measure "$rule-adapted" "demo/$rule-adapted" 64,128,256
    }
    after="$after demo/results/$rule-adapted"
done

run compare demo/results/base $before --report demo/before.html
run compare demo/results/control $after --report demo/after.html
printf '\nBefore adapting: %s\nAfter adapting:  %s\n' "$PWD/demo/before.html" "$PWD/demo/after.html"
