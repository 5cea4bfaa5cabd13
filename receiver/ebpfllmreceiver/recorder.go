//go:build linux && amd64

package ebpfllmreceiver

import (
	"context"
	"crypto/rand"
	"net/netip"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/clock"
	"github.com/ebpfllm/ebpfllm/internal/httphead"
	"github.com/ebpfllm/ebpfllm/internal/stage"
	"github.com/ebpfllm/ebpfllm/internal/target"
	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver/internal/metadata"
	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver/internal/syscalls"
)

const (
	scopeName   = "github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver"
	requestSpan = "kernel.request"

	// maxBatch is the number of spans that are given on without waiting for the
	// next tick.
	maxBatch = 4096

	// ownTraceFlags of traces that begin here: sampled, with a random id.
	ownTraceFlags = 0x03

	afINET = 2 // the kernel's number of IPv4; other sockets are IPv6
)

// process is what is known of a process that requests came to, as the resource
// of its spans and metrics.
type process struct {
	target.Process
	host string
	gone bool // it has ended: nothing more is expected of it
}

// fill writes the resource attributes. What is not known is left out.
func (p *process) fill(r pcommon.Resource) {
	a := r.Attributes()
	put := func(name, value string) {
		if value != "" {
			a.PutStr(name, value)
		}
	}
	put("service.name", p.ServiceName)
	a.PutInt("process.pid", int64(p.PID))
	put("process.executable.name", p.Executable)
	put("process.linux.cgroup", p.Cgroup)
	put("container.id", p.ContainerID)
	put("host.name", p.host)
}

// recorder takes requests and their occurrences from the assembler, in the order
// in which they happen, and makes spans and histograms of them. It is for one
// goroutine, as assemble.Sink promises.
type recorder struct {
	spans         bool // there is a traces pipeline
	metrics       *metricStore
	emitUnsampled bool
	telemetry     *metadata.TelemetryBuilder
	lookup        func(pid uint32) *process
	offset        func() clock.Offset
	random        func([]byte) // fills with random bytes
	full          func()       // is called when maxBatch is reached

	open   map[assemble.Key]*openRequest
	batch  ptrace.Traces
	scopes map[*process]ptrace.ScopeSpans
	number uint64 // of the batch that is being filled
	held   int    // spans in it
	orphan uint64 // occurrences of no known request
}

var _ assemble.Sink = (*recorder)(nil)

// openRequest is what must be remembered from a request's beginning to its end.
type openRequest struct {
	request *assemble.Request
	process *process
	offset  clock.Offset // one for all times of the request
	trace   pcommon.TraceID
	span    pcommon.SpanID
	emit    bool   // spans are made of it
	batch   uint64 // number of the latest batch with an occurrence of it
	latest  uint64 // end of its last occurrence that became a span; 0 if none did
	lost    bool   // an occurrence of it was lost after it left the assembler
}

func newRecorder(lookup func(pid uint32) *process, offset func() clock.Offset, telemetry *metadata.TelemetryBuilder) *recorder {
	r := &recorder{
		lookup: lookup, offset: offset, telemetry: telemetry,
		random: randomBytes, full: func() {},
		open: map[assemble.Key]*openRequest{},
	}
	r.take()
	return r
}

// randomBytes never fails: without entropy the program ends, see crypto/rand.
func randomBytes(b []byte) { _, _ = rand.Read(b) }

// take returns the spans recorded since the last take and the number of the
// batch that they are.
func (r *recorder) take() (ptrace.Traces, uint64) {
	batch, number := r.batch, r.number
	r.batch, r.scopes = ptrace.NewTraces(), map[*process]ptrace.ScopeSpans{}
	r.number++
	r.held = 0
	return batch, number
}

// drop is told that a batch was lost, and marks the requests still open that had
// an occurrence in it.
func (r *recorder) drop(number uint64) {
	for _, o := range r.open {
		o.lost = o.lost || o.batch == number
	}
}

// Begin allots the ids of the request's span, so that occurrences can name their
// parent before it ends.
func (r *recorder) Begin(req *assemble.Request) {
	o := &openRequest{request: req, process: r.lookup(req.PID), offset: r.offset()}
	linked := req.Head.Linked()
	if linked {
		o.trace = req.Head.TraceID
		r.telemetry.ReceiverEbpfllmRequestsLinked.Add(context.Background(), 1, linkedByTraceparent)
	} else {
		r.fillRandom(o.trace[:])
		r.telemetry.ReceiverEbpfllmRequestsLinked.Add(context.Background(), 1, linkedByNone)
	}
	r.fillRandom(o.span[:])
	o.emit = r.spans
	if r.spans && linked && req.Head.TraceFlags&1 == 0 && !r.emitUnsampled {
		o.emit = false
		r.telemetry.ReceiverEbpfllmRequestsUnsampled.Add(context.Background(), 1)
	}
	r.open[req.Key] = o
}

// fillRandom makes an id, which is never all zero.
func (r *recorder) fillRandom(id []byte) {
	for {
		r.random(id)
		for _, b := range id {
			if b != 0 {
				return
			}
		}
	}
}

// Occurrence makes a span of a stretch of a stage.
func (r *recorder) Occurrence(occ *assemble.Occurrence) {
	o := r.open[occ.Key]
	if o == nil {
		r.orphan++
		return
	}
	if !o.emit {
		return
	}
	o.batch = r.number
	o.latest = max(o.latest, occ.End)
	s := r.newSpan(o)
	s.SetName(occ.Stage.String())
	s.SetKind(ptrace.SpanKindInternal)
	s.SetParentSpanID(o.span)
	r.newID(s)
	o.times(s, occ.Start, occ.End)

	a := s.Attributes()
	a.EnsureCapacity(10)
	a.PutStr("ebpfllm.stage", occ.Stage.String())
	method := o.method()
	if occ.SharedBy > 1 {
		method = assemble.LinkShared
	}
	o.common(a, method)
	if occ.TID != 0 {
		a.PutInt("ebpfllm.tid", int64(occ.TID))
	}
	if occ.Waker { // the resource is the process that the request came to
		a.PutBool("ebpfllm.waker", true)
		a.PutInt("process.pid", int64(occ.PID))
	}
	if occ.Syscall >= 0 {
		a.PutStr("ebpfllm.syscall.name", syscalls.Name(occ.Syscall))
	}
	if occ.Stretch != 0 {
		a.PutDouble("ebpfllm.stretch", seconds(occ.Stretch))
	}
	if occ.Stage == stage.PageFault {
		fault := "minor"
		if occ.Major {
			fault = "major"
		}
		a.PutStr("system.paging.fault.type", fault)
	}
	if occ.SharedBy > 1 {
		a.PutInt("ebpfllm.shared_by", int64(occ.SharedBy))
		r.link(s, occ)
	}
	r.bound()
}

// link names the kernel.request spans of the others that a stall delayed, and
// counts those that it does not name: they are too many, or no span is made of
// them.
func (r *recorder) link(s ptrace.Span, occ *assemble.Occurrence) {
	links := s.Links()
	links.EnsureCapacity(len(occ.Others))
	for _, k := range occ.Others {
		other := r.open[k]
		if other == nil || !other.emit {
			continue
		}
		l := links.AppendEmpty()
		l.SetTraceID(other.trace)
		l.SetSpanID(other.span)
		if other.request.Head.Linked() {
			l.TraceState().FromRaw(other.request.Head.TraceState)
		}
		l.SetFlags(other.flags())
	}
	s.SetDroppedLinksCount(uint32(max(occ.SharedBy-1-links.Len(), 0)))
}

// Finish makes the request's own span and counts it in the metrics.
func (r *recorder) Finish(req *assemble.Request) {
	o := r.open[req.Key]
	if o == nil {
		return // Begin comes first
	}
	delete(r.open, req.Key)
	o.request = req
	if req.Refused != "" { // counted by the assembler; there is no true account of it
		if o.latest != 0 {
			r.refusedSpan(o, req)
			r.bound()
		}
		return
	}
	if r.metrics != nil {
		r.metrics.record(o.process, req, o.offset.Unix(req.Start), o.offset.Unix(req.End), o.exemplar())
	}
	if o.emit {
		r.requestSpan(o, req)
		r.bound()
	}
}

// exemplar returns the ids of the request's span if that span, or at least its
// trace, is exported somewhere; else zero ids.
func (o *openRequest) exemplar() exemplarIDs {
	sampled := o.request.Head.Linked() && o.request.Head.TraceFlags&1 != 0
	switch {
	case o.emit:
		return exemplarIDs{o.trace, o.span}
	case sampled: // by the application alone
		return exemplarIDs{o.trace, o.request.Head.ParentID}
	}
	return exemplarIDs{}
}

func (r *recorder) requestSpan(o *openRequest, req *assemble.Request) {
	a := r.newRequestSpan(o, req, req.End).Attributes()
	putStages(a, req)
	putResponse(a, req)
	if req.SharedBy > 1 {
		a.PutInt("ebpfllm.shared_by", int64(req.SharedBy))
	}
}

// refusedSpan closes the trace of a refused request whose occurrences have left
// already: they name this span as their parent, and whoever waits for the whole
// of the trace would wait in vain. It ends with the last of them, and claims
// nothing of stages and response.
func (r *recorder) refusedSpan(o *openRequest, req *assemble.Request) {
	a := r.newRequestSpan(o, req, o.latest).Attributes()
	unavailable := a.PutEmptySlice("ebpfllm.stages.unavailable")
	for _, s := range allStages {
		unavailable.AppendEmpty().SetStr(s.String())
	}
}

// newRequestSpan makes the request's span with what is true of any.
func (r *recorder) newRequestSpan(o *openRequest, req *assemble.Request, end uint64) ptrace.Span {
	s := r.newSpan(o)
	s.SetName(requestSpan)
	s.SetSpanID(o.span)
	if req.Head.Linked() {
		s.SetKind(ptrace.SpanKindInternal)
		s.SetParentSpanID(req.Head.ParentID)
	} else {
		s.SetKind(ptrace.SpanKindServer)
		if req.Status >= 500 {
			s.Status().SetCode(ptrace.StatusCodeError)
		}
	}
	o.times(s, req.Start, end)

	a := s.Attributes()
	a.EnsureCapacity(48)
	o.common(a, o.method())
	if why := o.incomplete(); len(why) > 0 {
		list := a.PutEmptySlice("ebpfllm.incomplete.reasons")
		for _, reason := range why {
			list.AppendEmpty().SetStr(reason)
		}
	}
	if req.TID != 0 {
		a.PutInt("ebpfllm.tid", int64(req.TID))
	}
	putNetwork(a, req)
	return s
}

func (r *recorder) newSpan(o *openRequest) ptrace.Span {
	scope, ok := r.scopes[o.process]
	if !ok {
		rs := r.batch.ResourceSpans().AppendEmpty()
		o.process.fill(rs.Resource())
		scope = rs.ScopeSpans().AppendEmpty()
		scope.Scope().SetName(scopeName)
		r.scopes[o.process] = scope
	}
	s := scope.Spans().AppendEmpty()
	r.held++
	s.SetTraceID(o.trace)
	if o.request.Head.Linked() {
		s.TraceState().FromRaw(o.request.Head.TraceState)
	}
	s.SetFlags(o.flags())
	return s
}

// flags are the trace flags of the request's spans.
func (o *openRequest) flags() uint32 {
	if o.request.Head.Linked() {
		return uint32(o.request.Head.TraceFlags)
	}
	return ownTraceFlags
}

func (r *recorder) newID(s ptrace.Span) {
	var id pcommon.SpanID
	r.fillRandom(id[:])
	s.SetSpanID(id)
}

func (r *recorder) bound() {
	if r.held >= maxBatch {
		r.full()
	}
}

func (o *openRequest) times(s ptrace.Span, start, end uint64) {
	s.SetStartTimestamp(pcommon.Timestamp(o.offset.Unix(start)))
	s.SetEndTimestamp(pcommon.Timestamp(o.offset.Unix(max(start, end))))
}

// incomplete lists why the request's record is not whole, as far as is known.
func (o *openRequest) incomplete() []string {
	why := o.request.Incomplete
	if o.lost {
		why = append([]string{"occurrences_lost"}, why...)
	}
	if o.request.Refused != "" {
		why = append([]string{o.request.Refused}, why...)
	}
	return why
}

// method is how the request's own span was tied to its trace.
func (o *openRequest) method() string {
	if o.request.Head.Linked() {
		return assemble.LinkTraceparent
	}
	return assemble.LinkNone
}

// common puts the attributes that every span has.
func (o *openRequest) common(a pcommon.Map, method string) {
	a.PutStr("ebpfllm.link.method", method)
	a.PutBool("ebpfllm.incomplete", len(o.incomplete()) > 0)
}

var (
	allStages       = stage.All()
	stageAttribute  = attributeNames("ebpfllm.stage.")
	socketAttribute = attributeNames("ebpfllm.socket.")
	wakerAttribute  = attributeNames("ebpfllm.waker.")
)

func attributeNames(prefix string) (names [stage.Count]string) {
	for _, s := range stage.All() {
		names[s] = prefix + s.String()
	}
	return names
}

func putStages(a pcommon.Map, req *assemble.Request) {
	missing := missingStages(req)
	if len(req.Missing) > 0 {
		unavailable := a.PutEmptySlice("ebpfllm.stages.unavailable")
		for _, s := range req.Missing {
			unavailable.AppendEmpty().SetStr(s.String())
		}
	}
	for _, s := range allStages {
		if missing[s] {
			continue
		}
		a.PutDouble(stageAttribute[s], seconds(req.Exclusive[s]))
		if s.Socket() {
			a.PutDouble(socketAttribute[s], seconds(req.Plain[s]))
		}
		if req.Waker[s] > 0 { // none, and none that could be followed, are told by its absence
			a.PutDouble(wakerAttribute[s], seconds(req.Waker[s]))
		}
	}
	if !missing[stage.PageFault] {
		a.PutDouble("ebpfllm.page_fault.major", seconds(req.MajorFault))
	}
	if !missing[stage.Retransmit] {
		a.PutInt("ebpfllm.retransmits", int64(req.Retransmits))
	}
	if req.SoftirqDelay >= 0 {
		a.PutDouble("ebpfllm.softirq.delay", seconds(req.SoftirqDelay))
	}
	if req.RemoteFaults >= 0 {
		a.PutInt("ebpfllm.numa.remote_faults", req.RemoteFaults)
	}
}

// missingStages tells of each stage whether it could not be measured for req.
func missingStages(req *assemble.Request) (missing [stage.Count]bool) {
	for _, s := range req.Missing {
		missing[s] = true
	}
	return missing
}

func putResponse(a pcommon.Map, req *assemble.Request) {
	a.PutBool("ebpfllm.response.streaming", req.Streaming)
	a.PutInt("ebpfllm.response.chunk.count", int64(req.Chunks))
	if d, ok := timeToFirstChunk(req); ok {
		a.PutDouble("ebpfllm.response.time_to_first_chunk", d)
	}
	if req.Gaps.N > 0 {
		a.PutDouble("ebpfllm.response.chunk.gap.p50", seconds(req.Gaps.P50))
		a.PutDouble("ebpfllm.response.chunk.gap.p99", seconds(req.Gaps.P99))
		a.PutDouble("ebpfllm.response.chunk.gap.max", seconds(req.Gaps.Max))
	}
}

func putNetwork(a pcommon.Map, req *assemble.Request) {
	a.PutStr("http.request.method", req.Head.Method)
	if req.Head.Path != "" {
		a.PutStr("url.path", req.Head.Path)
	}
	if req.Status != 0 {
		a.PutInt("http.response.status_code", int64(req.Status))
	}
	if op := httphead.GenAIOperation(req.Head.Path); op != "" {
		a.PutStr("gen_ai.operation.name", op)
	}
	local := address(req.Peer.Family, req.Peer.LocalAddr)
	server := req.Head.Host
	if server == "" {
		server = local.String()
	}
	a.PutStr("server.address", server)
	a.PutInt("server.port", int64(req.Peer.LocalPort))
	a.PutStr("client.address", address(req.Peer.Family, req.Peer.RemoteAddr).String())
	a.PutInt("client.port", int64(req.Peer.RemotePort))
	network := "ipv6"
	if local.Is4() {
		network = "ipv4"
	}
	a.PutStr("network.type", network)
	a.PutStr("network.transport", "tcp")
	a.PutStr("network.protocol.name", "http")
	a.PutStr("network.protocol.version", req.Head.Proto)
}

// address reads an address of a socket; IPv4 on an IPv6 socket is IPv4.
func address(family uint16, b [16]byte) netip.Addr {
	if family == afINET {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	return netip.AddrFrom16(b).Unmap()
}

func timeToFirstChunk(req *assemble.Request) (float64, bool) {
	if req.FirstChunk == 0 || req.FirstChunk < req.Start {
		return 0, false
	}
	return seconds(int64(req.FirstChunk - req.Start)), true
}

func seconds(ns int64) float64 { return float64(ns) / 1e9 }
