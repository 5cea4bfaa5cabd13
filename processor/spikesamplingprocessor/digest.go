package spikesamplingprocessor

import (
	"strings"
	"time"
	"unsafe"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/sampling"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// What the receiver writes and this processor reads; docs/design.md is the
// contract.
const (
	kernelScope   = "github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver"
	kernelRequest = "kernel.request"

	attrStage       = "ebpfllm.stage"   // of an occurrence
	prefixStage     = "ebpfllm.stage."  // exclusive seconds
	prefixSocket    = "ebpfllm.socket." // plain seconds
	attrUnavailable = "ebpfllm.stages.unavailable"
	attrIncomplete  = "ebpfllm.incomplete"
	attrMajor       = "ebpfllm.page_fault.major"
	attrSyscall     = "ebpfllm.syscall.name"
	attrSharedBy    = "ebpfllm.shared_by"
	attrWaker       = "ebpfllm.waker"  // of an occurrence: on another thread, which the request waited for
	prefixWaker     = "ebpfllm.waker." // of a request: exclusive seconds on such threads
	attrPID         = "process.pid"
	attrTID         = "ebpfllm.tid"
)

// role is what a span is to the decision on its trace.
type role uint8

const (
	roleKernel     role = 1 << iota // a kernel.request
	roleOccurrence                  // a stage's occurrence, child of a kernel.request
	roleRoot                        // may be a local root: SERVER, kernel.request, or no parent
	roleRemote                      // says itself that its parent is remote
	roleOwnRoot                     // a kernel.request of a trace that the receiver opened
)

// record is one buffered span: its OTLP bytes and its place in the tree. There are
// millions of them, so the bytes are held without a slice's capacity.
type record struct {
	data       *byte // see bytes
	scope      *scope
	id, parent pcommon.SpanID
	size       uint32 // of data; no protobuf message is larger than 2 GiB
	role       role
}

// bytes are a TracesData with this span, without resource and scope, and without its
// ids: those are in the record and its trace.
func (r *record) bytes() []byte { return unsafe.Slice(r.data, r.size) }

func (r *record) setBytes(b []byte) { r.data, r.size = unsafe.SliceData(b), uint32(len(b)) }

// item is one span on its way into the buffer, with what decides about it.
type item struct {
	record
	trace  pcommon.TraceID
	env    int // index into digest.envs
	status ptrace.StatusCode
	match  uint64 // bits of the policies whose condition it meets
	rv     uint64 // randomness from tracestate plus one; 0 if it has none
	th     uint64 // threshold from tracestate plus one; 0 if it has none
	kind   ptrace.SpanKind
	name   string
	start  int64 // ns since the epoch
	end    int64
	stage  stage.Stage // of an occurrence
	kernel *measures   // of a kernel.request
	in     *trace      // once it is buffered
	reopen bool        // its trace was dropped
}

// measures are the stages of a kernel.request.
type measures struct {
	operation  string
	incomplete bool // lower bounds: may exceed, must not be learned
	values     []measure
}

type measure struct {
	series  *seriesKind
	seconds float64
}

// env is the resource and scope of a batch's spans, before they are interned.
type env struct {
	resource, scope string // OTLP bytes
	service         string
	kernel          bool
}

// seriesKind is one of the values in which spikes are looked for.
type seriesKind struct {
	name   string      // in the baseline: distinct for exclusive and plain
	stage  stage.Stage // Unknown for spanSeries
	socket bool        // a plain total
	rank   int
}

// The ranks of series: of two spikes that explain a comparable part of a delay,
// the one of lower rank says more about its cause.
const (
	rankStall    = iota // an exclusive stall stage names a cause
	rankSocket          // a plain socket total may overlap with the thread's stages
	rankSyscall         // says where, not why
	rankLeftOver        // cpu, wait, unattributed: what is left over
	rankSpan            // an application span's own duration
	ranks
)

// spanSeries is an application span's own duration.
var spanSeries = &seriesKind{name: "span", rank: rankSpan}

// exclusive and plain hold the series of each stage; plain's are nil for stages
// that are no socket stages.
var exclusive, plain = func() (ex, pl [stage.Count]*seriesKind) {
	for _, s := range stage.All() {
		ex[s] = &seriesKind{name: s.String(), stage: s, rank: rankStall}
		switch {
		case !s.Stall():
			ex[s].rank = rankLeftOver
		case s == stage.Syscall:
			ex[s].rank = rankSyscall
		}
		if s.Socket() {
			pl[s] = &seriesKind{name: "socket." + s.String(), stage: s, socket: true, rank: rankSocket}
		}
	}
	return ex, pl
}()

// digest is what ConsumeTraces makes of a batch before it takes the lock. It is
// pooled: reset before use.
type digest struct {
	items      []item
	envs       []env
	conditions []*condition

	missingTrace, missingSpan int
	cutter                    cutter

	one       ptrace.Traces // scratch with one resource, scope and span
	span      ptrace.Span
	empty     ptrace.Traces // scratch with one resource and scope, no span
	marshaler ptrace.ProtoMarshaler
}

func newDigest(conditions []*condition, maxAttribute int) *digest {
	d := &digest{conditions: conditions, cutter: cutter{limit: maxAttribute}, one: ptrace.NewTraces(), empty: ptrace.NewTraces()}
	d.span = d.one.ResourceSpans().AppendEmpty().ScopeSpans().AppendEmpty().Spans().AppendEmpty()
	d.empty.ResourceSpans().AppendEmpty()
	return d
}

// reset forgets the last batch and its memory.
func (d *digest) reset() {
	clear(d.items)
	clear(d.envs)
	d.items, d.envs = d.items[:0], d.envs[:0]
	d.missingTrace, d.missingSpan, d.cutter.cuts = 0, 0, 0
	ptrace.NewSpan().MoveTo(d.span)
}

// take turns td into items. It consumes td: spans are moved out of it.
func (d *digest) take(td ptrace.Traces) {
	for _, rs := range td.ResourceSpans().All() {
		e := env{service: serviceName(rs.Resource())}
		out := d.empty.ResourceSpans().At(0)
		rs.Resource().MoveTo(out.Resource())
		out.SetSchemaUrl(rs.SchemaUrl())
		e.resource = d.marshal(d.empty)
		for _, ss := range rs.ScopeSpans().All() {
			e.kernel = ss.Scope().Name() == kernelScope
			scopeOut := out.ScopeSpans().AppendEmpty()
			ss.Scope().MoveTo(scopeOut.Scope())
			scopeOut.SetSchemaUrl(ss.SchemaUrl())
			e.scope = d.marshal(d.empty)
			d.envs = append(d.envs, e)
			for _, span := range ss.Spans().All() {
				switch {
				case span.TraceID().IsEmpty():
					d.missingTrace++
				case span.SpanID().IsEmpty():
					d.missingSpan++
				default:
					var match uint64
					for _, c := range d.conditions {
						if c.ask(out, scopeOut, span) {
							match |= c.bit
						}
					}
					d.takeSpan(span, len(d.envs)-1, match)
				}
			}
			out.ScopeSpans().RemoveIf(func(ptrace.ScopeSpans) bool { return true })
		}
	}
}

func (d *digest) marshal(td ptrace.Traces) string {
	b, _ := d.marshaler.MarshalTraces(td) // never fails
	return string(b)
}

func (d *digest) takeSpan(span ptrace.Span, envIndex int, match uint64) {
	it := item{
		record: record{id: span.SpanID(), parent: span.ParentSpanID()},
		trace:  span.TraceID(), env: envIndex, match: match,
		status: span.Status().Code(), kind: span.Kind(), name: span.Name(),
		start: int64(span.StartTimestamp()), end: int64(span.EndTimestamp()),
	}
	if ts := span.TraceState().AsRaw(); strings.Contains(ts, "rv:") || strings.Contains(ts, "th:") {
		it.rv, it.th = chances(ts)
	}
	if span.Flags()&flagsRemote == flagsRemote {
		it.role |= roleRemote
	}
	if it.kind == ptrace.SpanKindServer || it.parent.IsEmpty() {
		it.role |= roleRoot
	}
	if d.envs[envIndex].kernel {
		d.readKernel(&it, span)
	}
	d.cutter.cut(span)
	span.SetTraceID(pcommon.TraceID{})
	span.SetSpanID(pcommon.SpanID{})
	span.SetParentSpanID(pcommon.SpanID{})
	span.MoveTo(d.span)
	b, _ := d.marshaler.MarshalTraces(d.one) // never fails
	it.setBytes(b)
	d.items = append(d.items, it)
}

// flagsRemote are the bits by which a span says that its parent is remote: that
// it knows, and that it is.
const flagsRemote = 0x100 | 0x200

func (d *digest) readKernel(it *item, span ptrace.Span) {
	if it.name != kernelRequest {
		it.role &^= roleRoot
		if v, ok := span.Attributes().Get(attrStage); ok {
			if s, ok := stage.Parse(v.Str()); ok {
				it.role |= roleOccurrence
				it.stage = s
			}
		}
		return
	}
	it.role |= roleKernel | roleRoot
	if it.kind == ptrace.SpanKindServer && it.parent.IsEmpty() {
		it.role |= roleOwnRoot
	}
	it.kernel = readMeasures(span.Attributes())
}

func readMeasures(attrs pcommon.Map) *measures {
	m := &measures{}
	var route, path string
	var unavailable pcommon.Slice
	var haveUnavailable bool
	for k, v := range attrs.All() {
		switch k {
		case "gen_ai.operation.name":
			m.operation = v.Str()
		case "http.route":
			route = v.Str()
		case "url.path":
			path = v.Str()
		case attrIncomplete:
			m.incomplete = v.Bool()
		case attrUnavailable:
			if v.Type() == pcommon.ValueTypeSlice {
				unavailable, haveUnavailable = v.Slice(), true
			}
		default:
			series := &exclusive
			name, ok := strings.CutPrefix(k, prefixStage)
			if !ok {
				series = &plain
				if name, ok = strings.CutPrefix(k, prefixSocket); !ok {
					continue
				}
			}
			s, ok := stage.Parse(name)
			if ok && series[s] != nil && v.Type() == pcommon.ValueTypeDouble {
				m.values = append(m.values, measure{series[s], v.Double()})
			}
		}
	}
	if haveUnavailable {
		m.values = without(m.values, unavailable)
	}
	switch {
	case m.operation != "":
	case route != "":
		m.operation = route
	default:
		m.operation = routeOf(path)
	}
	return m
}

// without drops the stages that could not be measured: no value is no point,
// whatever the attribute says.
func without(values []measure, unavailable pcommon.Slice) []measure {
	kept := values[:0]
next:
	for _, m := range values {
		for _, u := range unavailable.All() {
			if u.Str() == m.series.stage.String() {
				continue next
			}
		}
		kept = append(kept, m)
	}
	return kept
}

// Bounds of a route made of a path.
const (
	maxSegments = 6
	maxSegment  = 40
)

// routeOf makes a route of a path, so that ids in it do not make each request
// an operation of its own: a segment that is long or has a digit, other than a
// version such as v1, becomes *.
func routeOf(path string) string {
	if path == "" {
		return "unknown"
	}
	segments := strings.SplitN(path, "/", maxSegments+2)
	if len(segments) > maxSegments+1 {
		segments[maxSegments+1] = "*"
	}
	for i, s := range segments {
		if len(s) > maxSegment || strings.ContainsAny(s, "0123456789") && !isVersion(s) {
			segments[i] = "*"
		}
	}
	return strings.Join(segments, "/")
}

func isVersion(s string) bool {
	return len(s) >= 2 && len(s) <= 3 && s[0] == 'v' && strings.Trim(s[1:], "0123456789") == ""
}

func serviceName(r pcommon.Resource) string {
	if v, ok := r.Attributes().Get("service.name"); ok && v.Str() != "" {
		return validName(v.Str())
	}
	return "unknown_service"
}

// chances returns the explicit randomness of a tracestate and the threshold by
// which it was sampled before, each plus one, or 0 for what is not there.
func chances(tracestate string) (rv, th uint64) {
	w, err := sampling.NewW3CTraceState(tracestate)
	if err != nil {
		return 0, 0
	}
	if r, ok := w.OTelValue().RValueRandomness(); ok {
		rv = r.Unsigned() + 1
	}
	if t, ok := w.OTelValue().TValueThreshold(); ok {
		th = t.Unsigned() + 1
	}
	return rv, th
}

// duration returns the span's duration in seconds, or -1 if its timestamps make
// no sense.
func (it *item) duration() float64 {
	if it.start <= 0 || it.end < it.start {
		return -1
	}
	return time.Duration(it.end - it.start).Seconds()
}
