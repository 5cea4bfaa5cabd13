#!/bin/sh
# go test -json in several modules: gotest.sh "MODULE..." FLAG... PACKAGE...
# One package at a time: the tests on real kernel events inject delays and would see each other's.
modules=$1 failed=0
shift
for module in $modules; do
	go -C "$module" test -json -p 1 "$@" || failed=1
done
exit $failed
