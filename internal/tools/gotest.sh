#!/bin/sh
# go test -json in several modules: gotest.sh "MODULE..." FLAG... PACKAGE...
modules=$1 failed=0
shift
for module in $modules; do
	go -C "$module" test -json "$@" || failed=1
done
exit $failed
