//go:generate go tool -modfile=../../internal/tools/go.mod mdatagen metadata.yaml

// Package ebpfllmreceiver measures, in the kernel, where each request of an LLM
// server spends its time, and gives it on as spans and metrics.
//
// The way of a record:
//
//	kernel.go    the kernel side at work: probe -> watcher, assembler -> recorder
//	recorder.go  requests and occurrences -> spans, and their values -> histograms
//	metrics.go   histograms -> metrics with exemplars, every collection_interval
//	sender.go    batches -> the next component, from a goroutine of its own
//	shared.go    one kernel side per component, however many pipelines use it
package ebpfllmreceiver
