//go:generate go tool -modfile=../../internal/tools/go.mod mdatagen metadata.yaml

// Package spikesamplingprocessor keeps the traces of latency spikes and drops
// the rest.
//
// It buffers spans by trace, learns what is normal per service, operation and
// stage (internal/baseline), clusters what stands out (internal/dbscan), decides
// once per trace, and annotates what it keeps: which stage, how far above its
// baseline, in which cluster, and the likely cause (internal/rootcause).
//
// The way of a span:
//
//	ConsumeTraces  digest.go   one span -> its OTLP bytes and what decides about it
//	               buffer.go   -> its trace, under a byte bound
//	               spikes.go   -> exceedances -> clustering windows
//	tick           decide.go   traces that are due -> keep or drop
//	sender         assemble.go kept bytes -> spans, put in their place in the tree,
//	                           annotated -> the next component
package spikesamplingprocessor
