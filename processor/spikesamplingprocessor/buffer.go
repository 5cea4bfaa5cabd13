package spikesamplingprocessor

import (
	"bytes"
	"container/heap"
	"hash/maphash"
	"time"
	"unsafe"

	"go.opentelemetry.io/collector/pdata/pcommon"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// resource is an interned resource: spans of many traces share it.
type resource struct {
	bytes   string // a TracesData with the resource alone
	service string
	refs    int // scopes
}

// scope is an interned scope of a resource.
type scope struct {
	resource *resource
	bytes    string // a TracesData with resource and scope, no spans
	kernel   bool
	refs     int // records
}

// trace is a buffered, undecided trace. Times are nanoseconds since the epoch,
// by the processor's clock.
type trace struct {
	id      pcommon.TraceID
	records []record
	index   map[pcommon.SpanID]int32 // of records, once there are many
	twins   map[twin]int32           // of records that share their id with one before
	stalls  []stall
	spikes  []*spike

	first, last int64 // arrival of the first and the last span
	rootAt      int64 // arrival of the last span that may be a local root, 0 if none
	due         int64 // when to look whether it is ready
	seq         uint64
	rv          uint64 // explicit randomness plus one, 0 if none
	th          uint64 // the least threshold that a span came with plus one, 0 if none
	bytes       int
	heapIndex   int
	prev, next  *trace // by arrival
	matched     uint64 // bit per policy whose condition a span met
	statuses    uint8  // bit per status code seen
	roles       role   // of all records
	foreignRoot bool   // a possible root other than the receiver's own
	reopened    bool   // kernel spans that came after the trace was dropped
}

// twin tells spans with one id apart.
type twin struct {
	id, parent pcommon.SpanID
	scope      *scope
	hash       uint64 // of the record's bytes
}

var twinSeed = maphash.MakeSeed()

func twinOf(r *record) twin {
	return twin{id: r.id, parent: r.parent, scope: r.scope, hash: maphash.Bytes(twinSeed, r.bytes())}
}

// same tells whether two records are the very same span.
func (r *record) same(o *record) bool {
	return r.scope == o.scope && r.id == o.id && r.parent == o.parent && bytes.Equal(r.bytes(), o.bytes())
}

// stall is the longest occurrence of a stage in a kernel.request: it gives a
// spike its time.
type stall struct {
	request  pcommon.SpanID
	stage    stage.Stage
	end      int64
	duration int64
}

// What a trace, a record and an interned string take of the heap beyond their
// own bytes. An entry of a map is its key and value and a half more, since maps
// are two thirds full on average.
var (
	traceOverhead  = allocated(int(unsafe.Sizeof(trace{}))) + mapEntry(unsafe.Sizeof(pcommon.TraceID{}), 8) + 12
	recordSize     = int(unsafe.Sizeof(record{}))
	spikeOverhead  = allocated(int(unsafe.Sizeof(spike{}))) + allocated(int(unsafe.Sizeof(point{}))) + pointInWindow + 16
	stallSize      = int(unsafe.Sizeof(stall{}))
	indexOverhead  = mapEntry(unsafe.Sizeof(pcommon.SpanID{}), 4)
	twinOverhead   = mapEntry(unsafe.Sizeof(twin{}), 4)
	lateOverhead   = recordSize + recordSize/4                                // one in a slice that grows by doubling
	internOverhead = allocated(int(unsafe.Sizeof(scope{}))) + mapEntry(16, 8) // a resource is no larger
)

// pointInWindow is what a spike takes in its partition and its window.
const pointInWindow = 200

func mapEntry(key, value uintptr) int { return int(key+value+1) * 3 / 2 }

// manySpans is the size from which a trace's spans are found by a map.
const manySpans = 64

// buffer holds the undecided traces.
type buffer struct {
	traces      map[pcommon.TraceID]*trace
	due         dueHeap
	first, last *trace // by arrival
	seq         uint64
	spans       int // of the traces
	bytes       int // of traces, what is interned for them, and the outbox
	resources   map[string]*resource
	scopes      map[string]*scope
}

func newBuffer() buffer {
	return buffer{
		traces:    map[pcommon.TraceID]*trace{},
		resources: map[string]*resource{},
		scopes:    map[string]*scope{},
	}
}

// intern returns the scope of e. It must get a record or be released.
func (b *buffer) intern(e *env) *scope {
	if s, ok := b.scopes[e.scope]; ok {
		return s
	}
	r, ok := b.resources[e.resource]
	if !ok {
		r = &resource{bytes: e.resource, service: e.service}
		b.resources[e.resource] = r
		b.bytes += allocated(len(r.bytes)) + internOverhead
	}
	s := &scope{resource: r, bytes: e.scope, kernel: e.kernel}
	b.scopes[e.scope] = s
	b.bytes += allocated(len(s.bytes)) + internOverhead
	r.refs++
	return s
}

// release forgets s if no record refers to it.
func (b *buffer) release(s *scope) {
	if s.refs > 0 || b.scopes[s.bytes] != s {
		return
	}
	delete(b.scopes, s.bytes)
	b.bytes -= allocated(len(s.bytes)) + internOverhead
	if s.resource.refs--; s.resource.refs == 0 {
		delete(b.resources, s.resource.bytes)
		b.bytes -= allocated(len(s.resource.bytes)) + internOverhead
	}
}

// get returns the trace, new if need be, due at the given time.
func (b *buffer) get(id pcommon.TraceID, now, due int64) *trace {
	if tr, ok := b.traces[id]; ok {
		return tr
	}
	b.seq++
	tr := &trace{id: id, first: now, last: now, due: due, seq: b.seq, prev: b.last}
	if b.last != nil {
		b.last.next = tr
	} else {
		b.first = tr
	}
	b.last = tr
	b.traces[id] = tr
	heap.Push(&b.due, tr)
	b.charge(tr, traceOverhead)
	return tr
}

func (b *buffer) charge(tr *trace, n int) {
	tr.bytes += n
	b.bytes += n
}

// add puts a span into its trace, unless the very same span is there already.
func (b *buffer) add(tr *trace, rec record) bool {
	if i, ok := tr.find(rec.id); ok {
		if tr.records[i].same(&rec) {
			return false
		}
		key := twinOf(&rec)
		if i, ok := tr.twins[key]; !ok {
			if tr.twins == nil {
				tr.twins = map[twin]int32{}
			}
			tr.twins[key] = int32(len(tr.records))
			b.charge(tr, twinOverhead)
		} else if tr.records[i].same(&rec) {
			return false
		}
	}
	room := cap(tr.records)
	tr.records = append(tr.records, rec)
	b.charge(tr, allocated(int(rec.size))+(cap(tr.records)-room)*recordSize)
	if tr.index != nil {
		tr.note(len(tr.records) - 1)
		b.charge(tr, indexOverhead)
	} else if len(tr.records) > manySpans {
		tr.index = make(map[pcommon.SpanID]int32, 2*manySpans)
		for i := range tr.records {
			tr.note(i)
		}
		b.charge(tr, len(tr.records)*indexOverhead)
	}
	rec.scope.refs++
	b.spans++
	tr.roles |= rec.role
	return true
}

// note enters the record into the index. The first of several with one id stays.
func (tr *trace) note(i int) {
	if _, ok := tr.index[tr.records[i].id]; !ok {
		tr.index[tr.records[i].id] = int32(i)
	}
}

// find returns the index of the first record with the id.
func (tr *trace) find(id pcommon.SpanID) (int, bool) {
	if tr.index != nil {
		i, ok := tr.index[id]
		return int(i), ok
	}
	for i := range tr.records {
		if tr.records[i].id == id {
			return i, true
		}
	}
	return 0, false
}

// noteStall keeps the longest occurrence of a stage in a request.
func (b *buffer) noteStall(tr *trace, s stall) {
	for i := range tr.stalls {
		if old := &tr.stalls[i]; old.request == s.request && old.stage == s.stage {
			if s.duration > old.duration {
				*old = s
			}
			return
		}
	}
	if len(tr.stalls) < maxStalls {
		room := cap(tr.stalls)
		tr.stalls = append(tr.stalls, s)
		b.charge(tr, (cap(tr.stalls)-room)*stallSize)
	}
}

// maxStalls bounds the requests and stages of a trace whose spikes get the time
// of their occurrence; the others get that of their request.
const maxStalls = 1024

// stallEnd returns when the request's longest occurrence of the stage ended.
func (tr *trace) stallEnd(request pcommon.SpanID, s stage.Stage) (int64, bool) {
	for i := range tr.stalls {
		if tr.stalls[i].request == request && tr.stalls[i].stage == s {
			return tr.stalls[i].end, true
		}
	}
	return 0, false
}

// setDue changes when the trace is looked at next.
func (b *buffer) setDue(tr *trace, due int64) {
	tr.due = due
	heap.Fix(&b.due, tr.heapIndex)
}

// remove takes the trace out. Its bytes stay charged until free.
func (b *buffer) remove(tr *trace) {
	delete(b.traces, tr.id)
	b.spans -= len(tr.records)
	heap.Remove(&b.due, tr.heapIndex)
	if tr.prev != nil {
		tr.prev.next = tr.next
	} else {
		b.first = tr.next
	}
	if tr.next != nil {
		tr.next.prev = tr.prev
	} else {
		b.last = tr.prev
	}
	tr.prev, tr.next = nil, nil
}

// free gives back a removed trace's bytes.
func (b *buffer) free(records []record, bytes int) {
	b.bytes -= bytes
	for i := range records {
		s := records[i].scope
		s.refs--
		b.release(s)
	}
}

// readiness is how a trace stands: whether a local root is there, whether a
// request in it still runs, and whether one is likely to, since its
// kernel.request has not come.
type readiness struct{ root, open, awaited bool }

// look finds out how the trace stands. A local root is a SERVER span or a
// kernel.request whose parent is remote or not buffered, or a span without
// parent. An occurrence whose parent is not buffered belongs to a request that
// still runs: the receiver exports the request's own span at its end. An entry
// span of a service that the receiver measures awaits its kernel.request: it
// ends when the response is handed to the socket, the kernel.request when the
// last byte has left.
func (tr *trace) look(services *operations) readiness {
	var r readiness
	if tr.roles&(roleRoot|roleOccurrence) == 0 {
		return r
	}
	wires := tr.wires()
	for i := range tr.records {
		rec := &tr.records[i]
		if rec.role&(roleRoot|roleOccurrence) == 0 {
			continue
		}
		parentHere, sameProcess := false, false
		if !rec.parent.IsEmpty() {
			var parent int
			if parent, parentHere = tr.find(rec.parent); parentHere {
				sameProcess = tr.records[parent].scope.resource == rec.scope.resource
			}
		}
		switch {
		case rec.role&roleOccurrence != 0:
			r.open = r.open || !parentHere
		case rec.role&roleRemote != 0 || !parentHere:
			r.root = true
		}
		if rec.entry() && (rec.role&roleRemote != 0 || !sameProcess) && !wires[rec.parent] && services.measures(rec.scope.resource.service) {
			r.awaited = true
		}
	}
	return r
}

// wires returns the parents that were on the wire of the trace's
// kernel.requests, nil if there are none.
func (tr *trace) wires() map[pcommon.SpanID]bool {
	if tr.roles&roleKernel == 0 {
		return nil
	}
	wires := map[pcommon.SpanID]bool{}
	for i := range tr.records {
		if rec := &tr.records[i]; rec.role&roleKernel != 0 && !rec.parent.IsEmpty() {
			wires[rec.parent] = true
		}
	}
	return wires
}

// measured returns the services of the trace that the receiver measured: those
// of its kernel.requests, and of the entry spans with the same parent. It is nil
// if there are none.
func (tr *trace) measured() map[string]bool {
	if tr.roles&roleKernel == 0 {
		return nil
	}
	wires, services := tr.wires(), map[string]bool{}
	for i := range tr.records {
		if rec := &tr.records[i]; rec.role&roleKernel != 0 || rec.entry() && wires[rec.parent] {
			services[rec.scope.resource.service] = true
		}
	}
	return services
}

// entry tells whether the span may be the first of a process in its trace: an
// application's SERVER span with a parent. (Only with one was there a context on
// the wire; else the receiver's span is in a trace of its own.)
func (r *record) entry() bool {
	return r.role&roleRoot != 0 && r.role&roleKernel == 0 && !r.parent.IsEmpty()
}

// ownRootWait is how long after its span a trace that the receiver opened itself
// is decided, at most: nobody else knows its id. With a tick more, the trace is out
// within a second of its end.
const ownRootWait = int64(800 * time.Millisecond)

// rootWait returns how long to wait after the last local root. Of a trace that
// was dropped nothing is left to wait for.
func (tr *trace) rootWait(afterRoot int64) int64 {
	switch {
	case tr.reopened:
		return 0
	case tr.foreignRoot:
		return afterRoot
	default:
		return min(afterRoot, ownRootWait)
	}
}

// dueHeap orders traces by when they are due, then by arrival.
type dueHeap []*trace

func (h dueHeap) Len() int { return len(h) }
func (h dueHeap) Less(i, j int) bool {
	if h[i].due != h[j].due {
		return h[i].due < h[j].due
	}
	return h[i].seq < h[j].seq
}

func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].heapIndex, h[j].heapIndex = i, j
}

// Push implements heap.Interface.
func (h *dueHeap) Push(x any) {
	tr := x.(*trace)
	tr.heapIndex = len(*h)
	*h = append(*h, tr)
}

// Pop implements heap.Interface.
func (h *dueHeap) Pop() any {
	old := *h
	tr := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return tr
}
