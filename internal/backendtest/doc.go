// Package backendtest sends kept traces and metrics to a real Jaeger and a real
// VictoriaMetrics, as the configurations in examples/ do, and reads them back
// through the back ends' own APIs. `make test-backends` builds the back ends and
// runs it; a plain `go test` does not, as they take minutes to compile.
package backendtest
