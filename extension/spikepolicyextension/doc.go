// Package spikepolicyextension lets contrib's tail_sampling keep latency spikes:
// it provides the spike policy of the spike_sampling processor as a policy type
// of tail_sampling. README.md says how, and what it cannot do there.
package spikepolicyextension
