package spikesamplingprocessor

import (
	"strings"
	"unicode/utf8"

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

// validName returns a name as an attribute may be told of it, within maxName
// bytes: a metric whose label is not UTF-8 keeps every other one from being read.
func validName(s string) string {
	// the replacement may be longer than what it replaces
	return cutName(strings.ToValidUTF8(cutName(s), "\uFFFD"))
}

// cutName cuts a name to maxName bytes, and no character in two.
func cutName(s string) string {
	n := min(len(s), maxName)
	for n < len(s) && n > maxName-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// operations names operations, within bounds, and knows which services the
// receiver measures.
type operations struct {
	max      int // of all services
	names    map[operationKey]*operation
	service  map[string]int   // operations per service
	measured map[string]int64 // services, and when last a kernel.request of them was seen, ns since the epoch
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
	return &operations{max: bound, names: map[operationKey]*operation{}, service: map[string]int{}, measured: map[string]int64{}}
}

// name returns the operation's name, or other.
func (o *operations) name(k operationKey, now int64) string {
	k.name = validName(k.name)
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

// measure notes that the receiver measured a request of the service. A service
// beyond the bound is as one that is not measured.
func (o *operations) measure(service string, now int64) {
	if _, ok := o.measured[service]; !ok {
		if len(o.measured) >= o.max {
			return
		}
		service = strings.Clone(service) // see name
	}
	o.measured[service] = now
}

// measures tells whether the receiver is known to measure the service.
func (o *operations) measures(service string) bool {
	_, ok := o.measured[service]
	return ok
}

// expire forgets operations and measured services that were not seen since.
func (o *operations) expire(since int64) {
	for k, op := range o.names {
		if op.seen < since {
			delete(o.names, k)
			if o.service[k.service]--; o.service[k.service] == 0 {
				delete(o.service, k.service)
			}
		}
	}
	for service, seen := range o.measured {
		if seen < since {
			delete(o.measured, service)
		}
	}
}
