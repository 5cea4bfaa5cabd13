// Package backendtest sends kept traces and metrics to a real Jaeger and a real
// VictoriaMetrics, as the configurations in examples/ do, and reads them back
// through the back ends' own APIs; and has samplers behind an agent come and go
// under a stream of traces, all of them real collectors; and has a collector killed, and
// its back end away. `make test-backends`
// builds what it needs and runs it; a plain `go test` does not, as that takes
// minutes to compile.
package backendtest
