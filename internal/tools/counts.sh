#!/bin/sh
# gotestsum's closing hook: one line with the counts. A package that did not build counts as a failure.
echo "$((TESTS_TOTAL - TESTS_FAILED - TESTS_SKIPPED)) passed, $((TESTS_FAILED + TESTS_ERRORS)) failed, $TESTS_SKIPPED skipped"
