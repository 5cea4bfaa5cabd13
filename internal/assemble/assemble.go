// Package assemble puts the kernel side's events together into requests.
//
// The kernel knows sockets and threads; HTTP is known here. A request's result
// is the last reading of it that the response's framing allows; its header
// bytes are parsed by internal/httphead and then wiped.
package assemble

import (
	"bytes"
	"maps"
	"math"
	"slices"

	"github.com/ebpfllm/ebpfllm/internal/httphead"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// Reasons for which a request is given on with Request.Incomplete.
const (
	IncompleteLost     = "records_lost"       // a record of it was lost on the way
	IncompleteHead     = "head_truncated"     // its header was longer than what is copied
	IncompleteArrival  = "arrival_not_seen"   // its first byte came before we watched: it may have begun earlier
	IncompleteAborted  = "aborted"            // the connection ended before the response did
	IncompleteResponse = "response_not_seen"  // no response head could be read: where it ends is a guess
	IncompleteStopped  = "receiver_stopped"   // the receiver ended before it did
	IncompleteStale    = "no_end_seen"        // nothing was heard of it for long, see Assembler.patience
	IncompleteSpans    = "occurrences_capped" // it had more occurrences than MaxOccurrences
)

// cutShort are the reasons for which the rest of a request is not known, so that
// nothing can be said of its end.
var cutShort = []string{IncompleteStopped, IncompleteStale}

// Reasons for which a request is refused: counted, and no span is made of it.
const (
	RefusedPipelined = "pipelined" // its bytes came before the previous response was complete
	RefusedUpgraded  = "upgraded"  // the connection speaks another protocol from here on
)

// Bounds on what is held.
const (
	MaxConnections = 1 << 16       // connections followed at one time; more are counted and not followed
	MaxHead        = 64 << 10      // bytes of one head
	MaxPending     = 32            // occurrences of a connection whose request has not been read yet
	MaxOccurrences = 1024          // of one request
	StaleAfter     = uint64(36e11) // 1 h in nanoseconds: a connection that is silent for so long is forgotten, sooner after losses
)

// Config of an Assembler.
type Config struct {
	Unavailable []stage.Stage // stages that the kernel side does not measure
	MinDuration int64         // nanoseconds: occurrences, or what others leave of them, that are shorter are not given on
	// OnCandidate is told which path a process was asked that is not a target
	// yet.
	OnCandidate func(pid uint32, path string)
}

// Assembler follows connections. It is not safe for concurrent use.
type Assembler struct {
	cfg      Config
	sink     Sink
	conns    map[uint64]*conn
	lanes    map[probe.Lane][]*request // requests in flight on each lane
	held     []*stall                  // in the order of their beginning
	stalls   map[stallKey][]*stall     // the same
	unproven []unproven                // whole requests whose last bytes may yet prove lost
	now      uint64
	swept    uint64
	lostAt   uint64 // records were lost before then; 0 if none
	crowded  uint64 // when room was last made
	unparsed map[string]uint64
}

// conn is a connection, by its socket cookie.
type conn struct {
	request *request
	pending []probe.Occurrence // of a request that has not been read yet
	ignored bool               // refused, or not HTTP/1: only its end matters
	closing bool               // shut for sending with bytes still unsent
	heard   uint64

	beheaded uint32 // number of the latest request whose head lacks its beginning
}

// request is a request in flight.
type request struct {
	Request
	lane     probe.Lane
	head     []byte // header bytes so far, until parsed
	begun    bool
	framing  httphead.Framing
	respHead []byte
	response *httphead.Response
	last     probe.Progress   // latest reading
	measured bool             // last is set
	chunkAt  uint64           // time of the latest chunk
	until    uint64           // it is whole, and finished then if nothing proves to be lost; 0 while it is not
	loss     probe.Retransmit // the latest word on what was sent again; its Retransmits are 0 if nothing was
	// lostBefore is what earlier losses than the present one took of it.
	lostBefore int64
	followed   bool               // the client has gone on to the next request: it had its answer
	spans      intervals          // taken by occurrences
	inParts    []probe.Occurrence // that wait for the reading that follows them, at most MaxPending
	count      int                // of occurrences given on
	given      proof              // by them
	held       []*delay           // by stalls that are held
	heard      uint64             // time of the latest event that was its own
	moved      bool               // another lane than the one that read it has gone on with it
	ended      bool               // it is off its connection, and settled
	problems   []string
}

// New returns an Assembler that gives what it finds to sink.
func New(cfg Config, sink Sink) *Assembler {
	return &Assembler{
		cfg: cfg, sink: sink,
		conns: map[uint64]*conn{}, lanes: map[probe.Lane][]*request{}, stalls: map[stallKey][]*stall{}, unparsed: map[string]uint64{},
	}
}

// Unparsed counts, by reason, the messages that no request was made of, or not
// all of it. The map is the caller's.
func (a *Assembler) Unparsed() map[string]uint64 {
	return maps.Clone(a.unparsed)
}

// InFlight is the number of requests that have begun and not ended.
func (a *Assembler) InFlight() int {
	n := 0
	for _, c := range a.conns {
		if c.request != nil && c.request.begun {
			n++
		}
	}
	return n
}

// Handle takes the next event. Events about processes are not for it.
func (a *Assembler) Handle(e probe.Event) {
	switch e := e.(type) {
	case *probe.RequestHead:
		a.requestHead(e)
	case *probe.ResponseHead:
		a.responseHead(e)
	case *probe.Progress:
		a.progress(e)
	case *probe.Occurrence:
		a.occurrence(e)
	case *probe.Close:
		a.close(e)
	case *probe.Retransmit:
		a.retransmit(e)
	case *probe.Tick:
		a.now = e.Now
		a.finishProven()
		a.releaseDue(a.now)
		a.sweep()
	}
}

// Close gives on every request in flight as it stands, marked as incomplete.
func (a *Assembler) Close() {
	for cookie, c := range a.conns {
		if r := c.request; r != nil {
			if r.until == 0 || r.losing() {
				r.problem(IncompleteStopped)
			}
			a.finish(c)
		}
		delete(a.conns, cookie)
	}
	a.releaseDue(math.MaxUint64)
}

func (a *Assembler) conn(s *probe.Socket) *conn {
	c := a.conns[s.Cookie]
	if c == nil {
		if !a.makeRoom(s.Time) {
			a.unparsed["too_many_connections"]++
			return nil
		}
		c = &conn{}
		a.conns[s.Cookie] = c
	}
	c.heard = max(c.heard, s.Time)
	return c
}

func (a *Assembler) requestHead(e *probe.RequestHead) {
	defer clear(e.Bytes) // what follows has copied what it may keep
	if e.Flags.Candidate {
		a.candidate(e)
		return
	}
	c := a.conn(&e.Socket)
	if c == nil {
		return
	}
	if r := c.request; r != nil && (r.Seq != e.Seq || !e.Flags.Continued) {
		if e.Flags.LostBefore && !r.complete() {
			r.problem(IncompleteLost) // perhaps the reading that would have completed it
		}
		if r.measured && !r.complete() && r.response != nil && e.Start < r.last.Time {
			// the client did not wait: which response bytes are whose cannot be told any more
			a.refuse(c, RefusedPipelined)
		} else {
			r.followed = true
			a.finish(c)
		}
	}
	if c.ignored {
		if e.Flags.Unreadable {
			a.unparsed["buffer_unknown"]++
		}
		return
	}
	r := c.request
	if r != nil && r.begun {
		a.unparsed[httphead.ReasonIncomplete]++ // the rest of a head that was whole already
		return
	}
	if r == nil {
		if e.Flags.Continued {
			if c.beheaded != e.Seq {
				a.unparsed["head_incomplete"]++ // its beginning was lost
			}
			c.beheaded = e.Seq
			return
		}
		r = &request{Request: Request{
			Key: Key{Cookie: e.Cookie, Seq: e.Seq}, PID: e.PID, TID: e.TID, Start: e.Start,
			Peer: Peer{Family: e.Family, LocalAddr: e.Local, RemoteAddr: e.Remote, LocalPort: e.LocalPort, RemotePort: e.RemotePort},
		}}
		c.request = r
	}
	if e.Flags.Unreadable {
		a.unparsed["buffer_unknown"]++
		c.request, c.ignored = nil, true
		return
	}
	if len(r.head)+len(e.Bytes) > MaxHead {
		a.unparsed[httphead.ReasonTooLong]++
		clear(r.head)
		c.request, c.ignored = nil, true
		return
	}
	r.head = append(r.head, e.Bytes...)
	if !e.Flags.Complete && !e.Flags.Truncated {
		return
	}
	head, framing, err := httphead.ParseRequest(r.head)
	clear(r.head)
	r.head = nil
	if err != nil {
		a.unparsed[httphead.Reason(err)]++
		c.request, c.ignored = nil, true
		return
	}
	if head.ContextProblem != "" {
		a.unparsed[head.ContextProblem]++
	}
	r.Head, r.framing = head, framing
	r.PID, r.TID, r.FirstRead = e.PID, e.TID, e.Time
	if framing.Truncated || e.Flags.Truncated {
		r.problem(IncompleteHead)
	}
	if e.Flags.NoArrival {
		r.problem(IncompleteArrival)
	}
	a.begin(c, e.Lane)
}

// candidate reports the path that an unclassified process was asked.
func (a *Assembler) candidate(e *probe.RequestHead) {
	if a.cfg.OnCandidate == nil || e.Flags.Continued {
		return
	}
	// The kernel side stops before the line feed; the carriage return is there.
	line := append(bytes.TrimRight(slices.Clone(e.Bytes), "\r\n"), "\r\n\r\n"...)
	if head, _, err := httphead.ParseRequest(line); err == nil {
		a.cfg.OnCandidate(e.PID, head.Path)
	}
	clear(line)
}

func (a *Assembler) begin(c *conn, lane probe.Lane) {
	r := c.request
	r.begun = true
	r.heard = r.FirstRead
	r.SharedBy = 1
	a.sink.Begin(&r.Request)
	a.enter(r, lane)
	for i := range c.pending {
		if c.pending[i].Time >= r.Start {
			a.own(r, &c.pending[i], r.FirstRead)
		}
	}
	c.pending = nil
}

// enter puts the request on a lane, where it shares what happens there.
func (a *Assembler) enter(r *request, lane probe.Lane) {
	if lane == r.lane {
		return
	}
	if r.lane != (probe.Lane{}) {
		r.handOver()
	}
	a.leave(r)
	if lane == (probe.Lane{}) {
		return
	}
	r.lane = lane
	a.lanes[lane] = append(a.lanes[lane], r)
	a.count(lane)
}

// handOver notes that another lane goes on with the request, since when is not
// known: its totals have nothing of what the earlier one did, nor may its spans.
func (r *request) handOver() {
	r.moved = true
	for _, d := range r.held {
		if d.told.Cookie == 0 {
			d.pieces = nil
		}
	}
}

// count tells those on a lane how many they are.
func (a *Assembler) count(lane probe.Lane) {
	on := a.known(a.lanes[lane])
	for _, r := range on {
		r.SharedBy = max(r.SharedBy, len(on))
	}
}

func (a *Assembler) leave(r *request) {
	on := a.lanes[r.lane]
	if i := slices.Index(on, r); i >= 0 {
		on = slices.Delete(on, i, i+1)
	}
	if len(on) == 0 {
		delete(a.lanes, r.lane)
	} else {
		a.lanes[r.lane] = on
	}
	r.lane = probe.Lane{}
}

func (a *Assembler) responseHead(e *probe.ResponseHead) {
	defer clear(e.Bytes)
	c := a.conns[e.Cookie]
	if c == nil || c.request == nil || c.request.Seq != e.Seq || !c.request.begun {
		return
	}
	r := c.request
	c.heard = e.Time
	a.hear(r, e.Time)
	if e.Flags.Unreadable || len(r.respHead)+len(e.Bytes) > MaxHead {
		return // no framing: the response ends with the next request or the connection
	}
	r.respHead = append(r.respHead, e.Bytes...)
	if !e.Flags.Complete && !e.Flags.Truncated {
		return
	}
	response, err := httphead.ParseResponse(r.respHead, r.Head.Method)
	clear(r.respHead)
	r.respHead = nil
	if err != nil {
		a.unparsed[httphead.Reason(err)]++
		return
	}
	r.response = &response
	r.Status = response.Status
}

func (a *Assembler) progress(e *probe.Progress) {
	c := a.conns[e.Cookie]
	if c == nil || c.request == nil || c.request.Seq != e.Seq || !c.request.begun {
		return
	}
	r := c.request
	c.heard = e.Time
	a.hear(r, e.Time)
	if r.until != 0 {
		return // it is whole
	}
	a.placeParts(r)
	if r.framing.ContentLength >= 0 && !r.framing.Truncated && !r.framing.Chunked &&
		e.Received > uint64(r.framing.HeadBytes)+uint64(r.framing.ContentLength) {
		a.refuse(c, RefusedPipelined)
		return
	}
	if r.response != nil && r.response.Upgrade {
		a.refuse(c, RefusedUpgraded)
		return
	}
	a.enter(r, e.Lane)
	r.chunk(e)
	r.last, r.measured = *e, true
	if r.complete() || c.closing {
		a.prove(e.Cookie, c)
	}
}

// chunk notes the response bytes that reached the device with this reading.
func (r *request) chunk(e *probe.Progress) {
	before, head := uint64(0), uint64(0)
	if r.measured {
		before = r.last.Sent
	}
	if r.response != nil {
		head = uint64(r.response.HeadBytes)
	}
	if e.Sent <= max(before, head) || int(e.Chunks) <= r.Chunks {
		return // the head, or the terminator of chunked encoding: no part of the answer
	}
	r.Chunks = int(e.Chunks)
	first := e.First
	if first == 0 {
		first = e.Time
	}
	if r.chunkAt == 0 {
		r.FirstChunk = first
	} else if first > r.chunkAt {
		r.Gaps.N++
		if len(r.GapValues) == MaxGapValues {
			r.GapValues = slices.Delete(r.GapValues, 0, MaxGapValues/4)
		}
		r.GapValues = append(r.GapValues, int64(first-r.chunkAt))
		r.Gaps.Max = max(r.Gaps.Max, int64(first-r.chunkAt))
	}
	r.chunkAt = e.Time
}

// complete tells whether the response is whole by its own framing.
func (r *request) complete() bool {
	if !r.measured || r.response == nil || r.response.Truncated {
		return false
	}
	if r.response.ContentLength >= 0 {
		return r.last.Sent >= uint64(r.response.HeadBytes)+uint64(r.response.ContentLength)
	}
	return r.response.Chunked && r.last.LastChunk
}

func (a *Assembler) close(e *probe.Close) {
	c := a.conns[e.Cookie]
	if c == nil {
		return
	}
	if r := c.request; r != nil {
		if e.Lost {
			r.problem(IncompleteLost)
		}
		switch {
		case e.Final, e.Drained && e.Acked:
			a.finish(c)
		case e.Drained:
			a.prove(e.Cookie, c)
		default:
			c.closing = true
		}
	}
	if e.Final {
		delete(a.conns, e.Cookie)
	}
}

// refuse gives up a request of which no true account can be given, and its
// connection with it.
func (a *Assembler) refuse(c *conn, reason string) {
	a.unparsed[reason]++
	r := c.request
	c.request, c.ignored = nil, true
	a.leave(r)
	if r.begun {
		r.Refused = reason
		a.sink.Finish(&r.Request)
	}
}

// finish gives on the connection's request as of its last reading.
func (a *Assembler) finish(c *conn) {
	r := c.request
	c.request = nil
	a.leave(r)
	if !r.begun {
		clear(r.head)
		a.unparsed[httphead.ReasonIncomplete]++
		return
	}
	switch {
	case !r.measured:
		// begun, and nothing more is known of it: its end would be invented
		r.Refused = IncompleteLost
		a.unparsed["no_reading"]++
		a.sink.Finish(&r.Request)
		return
	case r.response == nil && r.last.Sent > 0:
		r.problem(IncompleteResponse)
	case r.followed || len(r.problems) > 0 && slices.Contains(cutShort, r.problems[len(r.problems)-1]):
	case r.last.Sent == 0, !r.complete() && (r.response.ContentLength >= 0 || r.response.Chunked):
		r.problem(IncompleteAborted)
	}
	if r.loss.Over && !r.loss.Acked {
		r.problem(IncompleteAborted)
	}
	a.placeParts(r)
	r.settle(a.cfg.Unavailable)
	r.ended = true
	if len(r.held) == 0 {
		a.give(r)
	}
}

// give gives on a request that has ended, after its occurrences.
func (a *Assembler) give(r *request) {
	slices.Sort(r.problems)
	r.Incomplete = r.problems
	a.sink.Finish(&r.Request)
}

func (r *request) problem(reason string) {
	if !slices.Contains(r.problems, reason) {
		r.problems = append(r.problems, reason)
	}
}

// sweep forgets connections whose end was never told.
func (a *Assembler) sweep() {
	if a.now < a.swept+StaleAfter/60 {
		return
	}
	a.swept = a.now
	a.forget(a.now, a.patience)
}
