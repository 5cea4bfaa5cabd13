package spikesamplingprocessor

import (
	"strings"

	"go.opentelemetry.io/collector/pdata/ptrace"

	"github.com/ebpfllm/ebpfllm/internal/baseline"
)

// otherOperation stands for the operations of a service beyond maxOperations.
const otherOperation = "other"

// maxOperations bounds the operations told apart per service, so that hostile
// paths or span names cannot push out the series of real ones.
const maxOperations = 200

// maxName bounds the length of a service's or operation's name, in bytes.
const maxName = 256

// operations names operations, within bounds.
type operations struct {
	max     int // of all services
	names   map[operationKey]*operation
	service map[string]int // operations per service
}

type operationKey struct {
	service, name string
	kind          ptrace.SpanKind
	kernel        bool // a kernel.request's operation; else an application span's name
}

type operation struct {
	name string
	seen int64 // ns since the epoch
}

func newOperations(bound int) *operations {
	return &operations{max: bound, names: map[operationKey]*operation{}, service: map[string]int{}}
}

// name returns the operation's name, or other.
func (o *operations) name(k operationKey, now int64) string {
	k.name = k.name[:min(len(k.name), maxName)]
	if k.name == baseline.Every {
		return otherOperation // the name of what all operations have in common
	}
	if op, ok := o.names[k]; ok {
		op.seen = now
		return op.name
	}
	if len(o.names) >= o.max || o.service[k.service] >= maxOperations {
		return otherOperation
	}
	// The key's strings belong to the incoming data: do not keep that alive.
	k.service, k.name = strings.Clone(k.service), strings.Clone(k.name)
	op := &operation{name: k.name, seen: now}
	if !k.kernel {
		op.name += " (" + strings.ToLower(k.kind.String()) + ")"
	}
	o.names[k] = op
	o.service[k.service]++
	return op.name
}

// expire forgets operations that were not seen since.
func (o *operations) expire(since int64) {
	for k, op := range o.names {
		if op.seen < since {
			delete(o.names, k)
			if o.service[k.service]--; o.service[k.service] == 0 {
				delete(o.service, k.service)
			}
		}
	}
}
