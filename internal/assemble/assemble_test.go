package assemble

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

const ms = 1_000_000

// log is a sink that remembers, and notes what Sink and Occurrence promise and do
// not keep.
type log struct {
	begun       []Request
	occurrences []Occurrence
	finished    []Request
	open        map[Key]int // requests begun and not finished: the fuzzer uses a key more than once
	problems    []string
}

func (l *log) Begin(r *Request) {
	l.begun = append(l.begun, *r)
	if l.open == nil {
		l.open = map[Key]int{}
	}
	l.open[r.Key]++
}

func (l *log) Occurrence(o *Occurrence) {
	l.occurrences = append(l.occurrences, *o)
	for _, k := range append([]Key{o.Key}, o.Others...) {
		if l.open[k] == 0 {
			l.problems = append(l.problems, fmt.Sprintf("%v names %v, which is not open", o, k))
		}
	}
	if len(o.Others) != min(o.SharedBy-1, MaxOthers) {
		l.problems = append(l.problems, fmt.Sprintf("%v is shared by %d", o, o.SharedBy))
	}
}

func (l *log) Finish(r *Request) {
	l.finished = append(l.finished, *r)
	l.open[r.Key]--
}

func only[T any](t *testing.T, list []T) T {
	t.Helper()
	require.Len(t, list, 1)
	return list[0]
}

func socket(cookie uint64, seq uint32, at uint64) probe.Socket {
	return probe.Socket{Cookie: cookie, Seq: seq, Time: at * ms}
}

var thread = probe.Lane{PID: 7, ID: 8}

// asked is a whole request head, read at a time in ms that began a ms earlier.
func asked(cookie uint64, seq uint32, at uint64, head string) *probe.RequestHead {
	return &probe.RequestHead{
		Socket: socket(cookie, seq, at), PID: 7, TID: 8, Start: (at - 1) * ms, Lane: thread,
		Flags: probe.HeadFlags{Complete: true}, Bytes: []byte(head),
	}
}

func answered(cookie uint64, seq uint32, at uint64, head string) *probe.ResponseHead {
	return &probe.ResponseHead{Socket: socket(cookie, seq, at), Flags: probe.HeadFlags{Complete: true}, Bytes: []byte(head)}
}

// sent is a reading after n response bytes, with all time since the start on the CPU.
func sent(r *probe.RequestHead, at uint64, n int) *probe.Progress {
	p := &probe.Progress{Socket: socket(r.Cookie, r.Seq, at), Lane: r.Lane, Start: r.Start, FirstRead: r.Time, Sent: uint64(n), Chunks: 1}
	p.Exclusive[stage.CPU] = int64(p.Time - r.Start)
	return p
}

const (
	get    = "GET /v1/models?key=secret HTTP/1.1\r\nHost: llm\r\n\r\n"
	post   = "POST /v1/completions HTTP/1.1\r\nHost: llm\r\nContent-Length: 4\r\n\r\n"
	ok     = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
	stream = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)

func feed(a *Assembler, events ...probe.Event) {
	for _, e := range events {
		a.Handle(e)
	}
}

// settle lets so much time pass that no stall is held any more.
func settle(a *Assembler) { feed(a, &probe.Tick{Now: 20_000 * ms}) }

func TestARequestEndsWithTheReadingThatCompletesItsResponse(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	r := asked(1, 1, 10, get)
	head := r.Bytes
	feed(a, r, answered(1, 1, 12, ok), sent(r, 13, len(ok)))
	assert.Empty(t, l.finished, "the body is still to come")
	feed(a, sent(r, 15, len(ok)+2), sent(r, 99, len(ok)+2))
	got := only(t, l.finished)
	assert.Equal(t, "/v1/models", got.Head.Path)
	assert.Equal(t, 200, got.Status)
	assert.EqualValues(t, 15*ms, got.End)
	assert.EqualValues(t, 15*ms, got.FirstChunk)
	assert.EqualValues(t, 6*ms, got.Exclusive[stage.CPU])
	assert.Empty(t, got.Incomplete)
	assert.Equal(t, make([]byte, len(head)), head, "header bytes are wiped once parsed")
	assert.Zero(t, a.InFlight())
}

func TestFraming(t *testing.T) {
	for _, c := range []struct {
		name, request, response string
		bytes                   int
		last                    bool
		done                    bool
	}{
		{"HEAD has no body", strings.Replace(get, "GET", "HEAD", 1), "HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n", 42, false, true},
		{"204 has no body", get, "HTTP/1.1 204 No Content\r\n\r\n", 27, false, true},
		{"304 has no body", get, "HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", 48, false, true},
		{"chunked ends with its terminator", get, stream, 200, true, true},
		{"chunked goes on without it", get, stream, 200, false, false},
		{"without a length it lasts until the close", get, "HTTP/1.0 200 OK\r\n\r\n", 200, false, false},
		{"a length counts from the blank line", get, ok, len(ok) + 1, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var l log
			a := New(Config{}, &l)
			r := asked(1, 1, 10, c.request)
			p := sent(r, 20, c.bytes)
			p.LastChunk = c.last
			feed(a, r, answered(1, 1, 12, c.response), p)
			assert.Equal(t, c.done, len(l.finished) == 1)
			feed(a, &probe.Close{Socket: socket(1, 1, 30), Drained: true, Final: true})
			got := only(t, l.finished)
			assert.EqualValues(t, 20*ms, got.End, "nothing is charged after the last reading")
			wantAborted := !c.done && !strings.HasPrefix(c.response, "HTTP/1.0")
			assert.Equal(t, wantAborted, len(got.Incomplete) == 1, got.Incomplete)
		})
	}
}

func TestChunksAndTheirGaps(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	r := asked(1, 1, 10, post)
	feed(a, r, answered(1, 1, 12, stream))
	n := len(stream)
	feed(a, sent(r, 12, n)) // the head alone is no chunk
	for i, at := range []uint64{20, 22, 24, 74} {
		n += 14
		p := sent(r, at, n)
		p.Chunks = uint32(1 + i)
		feed(a, p)
	}
	end := sent(r, 80, n+5)
	end.Chunks, end.LastChunk = 4, true
	feed(a, end)
	got := only(t, l.finished)
	assert.Equal(t, 4, got.Chunks, "the terminator is no chunk")
	assert.Equal(t, Gaps{N: 3, P50: 2 * ms, P99: 50 * ms, Max: 50 * ms}, got.Gaps)
	assert.Equal(t, []int64{2 * ms, 2 * ms, 50 * ms}, got.GapValues)
	assert.EqualValues(t, 20*ms, got.FirstChunk)
	assert.True(t, got.Streaming)
}

func TestGapsAreBounded(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	r := asked(1, 1, 10, get)
	feed(a, r, answered(1, 1, 12, stream))
	for i := range 3 * MaxGapValues {
		p := sent(r, uint64(20+i), len(stream)+1+i)
		p.Chunks = uint32(1 + i)
		feed(a, p)
	}
	feed(a, &probe.Close{Socket: socket(1, 1, 99999), Final: true})
	got := only(t, l.finished)
	assert.LessOrEqual(t, len(got.GapValues), MaxGapValues)
	assert.Equal(t, 3*MaxGapValues-1, got.Gaps.N)
}

func TestStagesSumToTheWallTime(t *testing.T) {
	for _, c := range []struct {
		name        string
		exclusive   map[stage.Stage]int64
		unavailable []stage.Stage
		noLane      bool
		want        map[stage.Stage]int64
		missing     int
	}{
		{name: "what nothing explains is unattributed", exclusive: map[stage.Stage]int64{stage.Lock: 3}, want: map[stage.Stage]int64{stage.Lock: 3, stage.Unattributed: 7}},
		{name: "the time of the send's return comes off the processor's", exclusive: map[stage.Stage]int64{stage.CPU: 4, stage.Lock: 8}, want: map[stage.Stage]int64{stage.CPU: 2, stage.Lock: 8}},
		{name: "then off the weakest claim", exclusive: map[stage.Stage]int64{stage.CPU: 1, stage.Lock: 8, stage.Wait: 5}, want: map[stage.Stage]int64{stage.Lock: 8, stage.Wait: 2}},
		{name: "negative is nothing", exclusive: map[stage.Stage]int64{stage.Wait: -5}, want: map[stage.Stage]int64{stage.Unattributed: 10}},
		{name: "unavailable is missing, not zero", exclusive: map[stage.Stage]int64{stage.PageFault: 4, stage.CPU: 6}, unavailable: []stage.Stage{stage.PageFault}, want: map[stage.Stage]int64{stage.CPU: 6, stage.Unattributed: 4}, missing: 1},
		{name: "an unknown lane leaves the socket's stages", exclusive: map[stage.Stage]int64{stage.CPU: 4, stage.ReceiveQueue: 2}, noLane: true, want: map[stage.Stage]int64{stage.ReceiveQueue: 2, stage.Unattributed: 8}, missing: int(stage.Wait)},
	} {
		t.Run(c.name, func(t *testing.T) {
			var l log
			a := New(Config{Unavailable: c.unavailable}, &l)
			r := asked(1, 1, 10, get)
			p := sent(r, 19, len(ok)+2)
			p.Exclusive = stage.Times{}
			for s, v := range c.exclusive {
				p.Exclusive[s] = v * ms
			}
			p.NoLane = c.noLane
			feed(a, r, answered(1, 1, 12, ok), p)
			got := only(t, l.finished)
			var want stage.Times
			for s, v := range c.want {
				want[s] = v * ms
			}
			assert.Equal(t, want, got.Exclusive)
			assert.Len(t, got.Missing, c.missing)
		})
	}
}

func TestRefusals(t *testing.T) {
	body := "abcd"
	for _, c := range []struct {
		name, reason string
		events       func(r *probe.RequestHead) []probe.Event
	}{
		{"a second request in the first one's bytes", RefusedPipelined, func(r *probe.RequestHead) []probe.Event {
			p := sent(r, 20, len(ok)+2)
			p.Received = uint64(len(post) + len(body) + 1)
			return []probe.Event{answered(1, 1, 12, ok), p}
		}},
		{"a second request before the first one's answer is whole", RefusedPipelined, func(r *probe.RequestHead) []probe.Event {
			next := asked(1, 2, 30, get)
			next.Start = 15 * ms
			return []probe.Event{answered(1, 1, 12, ok), sent(r, 20, len(ok)), next}
		}},
		{"another protocol", RefusedUpgraded, func(r *probe.RequestHead) []probe.Event {
			return []probe.Event{answered(1, 1, 12, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"), sent(r, 20, 80)}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var l log
			a := New(Config{}, &l)
			r := asked(1, 1, 10, post)
			feed(a, r)
			feed(a, c.events(r)...)
			assert.Equal(t, c.reason, only(t, l.finished).Refused)
			assert.Equal(t, map[string]uint64{c.reason: 1}, a.Unparsed())
			feed(a, asked(1, 3, 40, get))
			assert.Len(t, l.begun, 1, "nothing more is made of this connection")
			feed(a, asked(2, 1, 40, get))
			assert.Len(t, l.begun, 2, "others go on")
		})
	}
}

func TestWhatIsNoRequestIsCountedAndLosesNothingElse(t *testing.T) {
	for _, c := range []struct {
		name, reason string
		head         *probe.RequestHead
	}{
		{"TLS", "request_malformed", asked(1, 1, 10, "\x16\x03\x01\x02\r\n\r\n")},
		{"HTTP/2", "http2", asked(1, 1, 10, "PRI * HTTP/2.0\r\n\r\n")},
		{"a buffer that is not known", "buffer_unknown", &probe.RequestHead{Socket: socket(1, 1, 10), Flags: probe.HeadFlags{Unreadable: true}}},
		{"the rest of a head whose beginning was lost", "head_incomplete", &probe.RequestHead{Socket: socket(1, 1, 10), Flags: probe.HeadFlags{Continued: true, Complete: true}, Bytes: []byte("x: y\r\n\r\n")}},
		{"a traceparent that is none", "traceparent_malformed", asked(1, 1, 10, "GET / HTTP/1.1\r\nHost: x\r\ntraceparent: 00-zz\r\n\r\n")},
		{"two traceparents", "traceparent_repeated", asked(1, 1, 10, "GET / HTTP/1.1\r\nHost: x\r\ntraceparent: a\r\ntraceparent: b\r\n\r\n")},
		{"an enormous traceparent", "traceparent_too_long", asked(1, 1, 10, "GET / HTTP/1.1\r\nHost: x\r\ntraceparent: "+strings.Repeat("0", 2000)+"\r\n\r\n")},
	} {
		t.Run(c.name, func(t *testing.T) {
			var l log
			a := New(Config{}, &l)
			feed(a, c.head)
			assert.Equal(t, map[string]uint64{c.reason: 1}, a.Unparsed())
			for _, r := range l.begun {
				assert.False(t, r.Head.Linked(), "measured, but not linked")
			}
			n := len(l.begun)
			if c.reason == "head_incomplete" {
				feed(a, asked(1, 2, 20, get))
				assert.Len(t, l.begun, n+1, "nor the next on the same connection")
				n++
			}
			feed(a, asked(2, 1, 20, get))
			assert.Len(t, l.begun, n+1)
		})
	}
}

func TestAHeadInPieces(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	first := asked(1, 1, 10, get[:9])
	first.Flags = probe.HeadFlags{}
	rest := asked(1, 1, 30, get[9:])
	rest.Flags = probe.HeadFlags{Continued: true, Complete: true}
	feed(a, first)
	assert.Empty(t, l.begun)
	feed(a, rest)
	got := only(t, l.begun)
	assert.Equal(t, "/v1/models", got.Head.Path)
	assert.EqualValues(t, 9*ms, got.Start)
	assert.EqualValues(t, 30*ms, got.FirstRead)
}

func TestALostRecordMarksTheRequest(t *testing.T) {
	r := asked(1, 1, 10, get)
	lost := sent(r, 20, len(ok)+2)
	lost.Lost = true
	for _, c := range []struct {
		name   string
		events []probe.Event
		want   string
	}{
		{"said by the kernel", []probe.Event{answered(1, 1, 12, ok), lost}, IncompleteLost},
		{"said with the next request's head", []probe.Event{answered(1, 1, 12, ok), sent(r, 20, len(ok)), lostBefore(asked(1, 2, 30, get))}, IncompleteLost},
		{"the response's head", []probe.Event{sent(r, 20, len(ok)+2), asked(1, 2, 30, get)}, IncompleteResponse},
	} {
		t.Run(c.name, func(t *testing.T) {
			var l log
			a := New(Config{}, &l)
			feed(a, asked(1, 1, 10, get))
			feed(a, c.events...)
			assert.Equal(t, []string{c.want}, only(t, l.finished).Incomplete)
		})
	}
	t.Run("all readings: no span can be made", func(t *testing.T) {
		var l log
		a := New(Config{}, &l)
		feed(a, asked(1, 1, 10, get), &probe.Close{Socket: socket(1, 1, 50), Drained: true, Final: true})
		assert.NotEmpty(t, only(t, l.finished).Refused)
		assert.Equal(t, map[string]uint64{"no_reading": 1}, a.Unparsed())
	})
	t.Run("the close: forgotten after an hour", func(t *testing.T) {
		var l log
		a := New(Config{}, &l)
		feed(a, asked(1, 1, 10, get), answered(1, 1, 12, stream), sent(r, 20, 500), &probe.Tick{Now: 10 * ms})
		feed(a, &probe.Tick{Now: StaleAfter / 2})
		assert.Empty(t, l.finished, "a stream may be silent for long")
		feed(a, &probe.Tick{Now: 2 * StaleAfter})
		assert.Contains(t, only(t, l.finished).Incomplete, IncompleteStale)
	})
}

// lostBefore says that a record was lost before this head.
func lostBefore(r *probe.RequestHead) *probe.RequestHead {
	r.Flags.LostBefore = true
	return r
}

// Each request whose buffer is not known is counted, the later ones of a connection too.
func TestEachHeadOfAnUnknownBufferIsCounted(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	for seq := range uint32(3) {
		feed(a, &probe.RequestHead{Socket: socket(1, seq+1, 10), Flags: probe.HeadFlags{Unreadable: true}})
	}
	assert.Equal(t, map[string]uint64{"buffer_unknown": 3}, a.Unparsed())
	assert.Zero(t, a.InFlight())
}

// Bytes of the body were read unseen: what was waited for is not known, but for what spans prove.
func TestAnUnseenReadLeavesItsStagesOut(t *testing.T) {
	var l log
	a := New(Config{MinDuration: ms}, &l)
	r := asked(1, 1, 10, get)
	feed(a, r, stretch(1, probe.Lane{}, stage.RequestBody, 12, 22))
	p := sent(r, 110, len(ok)+2)
	p.UnseenRead = true
	p.Exclusive[stage.CPU] = int64(5 * ms)
	p.Exclusive[stage.Wait] = int64(60 * ms)
	p.Exclusive[stage.ReceiveQueue] = int64(30 * ms)
	feed(a, &probe.ResponseHead{Socket: socket(1, 1, 109), Flags: probe.HeadFlags{Complete: true}, Bytes: []byte(ok)}, p)
	settle(a)
	require.Len(t, l.finished, 1)
	f := l.finished[0]
	assert.Equal(t, []stage.Stage{stage.Wait, stage.ReceiveQueue}, f.Missing)
	assert.Equal(t, int64(10*ms), f.Exclusive[stage.RequestBody])
	assert.Zero(t, f.Exclusive[stage.Wait]+f.Exclusive[stage.ReceiveQueue])
	assert.Equal(t, int64(f.End-f.Start)-int64(15*ms), f.Exclusive[stage.Unattributed])
}

func stretch(cookie uint64, lane probe.Lane, s stage.Stage, from, to uint64) *probe.Occurrence {
	return &probe.Occurrence{Socket: probe.Socket{Cookie: cookie, Time: to * ms}, PID: 7, Lane: lane, TID: 8, Stage: s, Start: from * ms, Duration: int64((to - from) * ms), Syscall: -1}
}

func spans(l *log) []string {
	var list []string
	for _, o := range l.occurrences {
		list = append(list, fmt.Sprintf("%d %s %d-%d/%d", o.Cookie, o.Stage, o.Start/ms, o.End/ms, o.SharedBy))
	}
	return list
}

func TestOccurrencesGoToWhomTheyDelayed(t *testing.T) {
	other := probe.Lane{PID: 7, ID: 99}
	for _, c := range []struct {
		name  string
		given []probe.Event
		want  []string
	}{
		{"of a lane: everyone in flight on it", []probe.Event{stretch(0, thread, stage.Lock, 20, 30)}, []string{"1 lock 20-30/2", "2 lock 20-30/2"}},
		{"of another lane: nobody", []probe.Event{stretch(0, other, stage.Lock, 20, 30)}, nil},
		{"of a socket: its request", []probe.Event{stretch(2, probe.Lane{}, stage.SendBuffer, 20, 30)}, []string{"2 send_buffer 20-30/1"}},
		{"of the process: everyone in it", []probe.Event{stretch(0, probe.Lane{}, stage.Stopped, 20, 30)}, []string{"1 stopped 20-30/2", "2 stopped 20-30/2"}},
		{"not before the request was read", []probe.Event{stretch(0, thread, stage.Lock, 2, 12)}, []string{"1 lock 10-12/1"}},
		{"never two at one time", []probe.Event{stretch(1, probe.Lane{}, stage.SendBuffer, 20, 40), stretch(1, probe.Lane{}, stage.Lock, 30, 50)}, []string{"1 send_buffer 20-40/1", "1 lock 40-50/1"}},
		{"around what is taken", []probe.Event{stretch(1, probe.Lane{}, stage.Lock, 25, 30), stretch(1, probe.Lane{}, stage.SendBuffer, 20, 40)}, []string{"1 send_buffer 20-25/1", "1 send_buffer 30-40/1", "1 lock 25-30/1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var l log
			a := New(Config{MinDuration: ms}, &l)
			second := asked(2, 1, 12, get)
			feed(a, asked(1, 1, 10, get), second)
			feed(a, c.given...)
			settle(a)
			assert.Equal(t, c.want, spans(&l))
		})
	}
}

func TestAnOccurrenceWaitsForTheHeadOfItsRequest(t *testing.T) {
	var l log
	a := New(Config{MinDuration: ms}, &l)
	r := asked(1, 1, 50, get)
	r.Start = 20 * ms
	feed(a, stretch(1, probe.Lane{}, stage.RunQueue, 20, 49), r)
	settle(a)
	assert.Equal(t, []string{"1 run_queue 20-49/1"}, spans(&l))
}

func TestOccurrencesAreBounded(t *testing.T) {
	var l log
	a := New(Config{MinDuration: ms}, &l)
	r := asked(1, 1, 10, get)
	for i := range uint64(2 * MaxPending) {
		feed(a, stretch(1, probe.Lane{}, stage.RunQueue, 10+2*i, 11+2*i))
	}
	feed(a, r)
	settle(a)
	assert.LessOrEqual(t, len(l.occurrences), MaxPending)
	for i := range uint64(2 * MaxOccurrences) {
		feed(a, stretch(0, thread, stage.PageFault, 1000+2*i, 1001+2*i))
	}
	feed(a, answered(1, 1, 12, ok), sent(r, 9000, len(ok)+2))
	settle(a)
	assert.Len(t, l.occurrences, MaxOccurrences)
	assert.Equal(t, []string{IncompleteSpans}, only(t, l.finished).Incomplete)
}

func TestRequestsOnOneThreadKnowOfEachOther(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	one, two := asked(1, 1, 10, get), asked(2, 1, 11, get)
	feed(a, one, two, answered(1, 1, 12, ok), sent(one, 13, len(ok)+2))
	three := asked(1, 2, 20, get)
	feed(a, three, answered(2, 1, 30, ok), sent(two, 31, len(ok)+2), answered(1, 2, 32, ok), sent(three, 33, len(ok)+2))
	for _, r := range l.finished {
		assert.Equal(t, 2, r.SharedBy, r.Key)
	}
	assert.Empty(t, a.lanes)
}

func TestCandidatesAreAskedOnlyForTheirPath(t *testing.T) {
	var l log
	var paths []string
	a := New(Config{OnCandidate: func(pid uint32, path string) { paths = append(paths, fmt.Sprintf("%d %s", pid, path)) }}, &l)
	line := asked(1, 1, 10, "POST /v1/chat/completions?x HTTP/1.1\r")
	line.Flags = probe.HeadFlags{Candidate: true}
	junk := asked(2, 1, 10, "\x00\x01\x02")
	junk.Flags = probe.HeadFlags{Candidate: true}
	feed(a, line, junk)
	assert.Equal(t, []string{"7 /v1/chat/completions"}, paths)
	assert.Empty(t, l.begun)
	assert.Empty(t, a.conns)
}

func TestConnectionsAreBounded(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	for i := range uint64(MaxConnections + 10) {
		feed(a, stretch(1+i, probe.Lane{}, stage.RunQueue, 10, 20))
	}
	assert.Len(t, a.conns, MaxConnections)
	assert.EqualValues(t, 10, a.Unparsed()["too_many_connections"])
}

func TestCloseGivesOnWhatIsInFlight(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	r := asked(1, 1, 10, get)
	feed(a, r, answered(1, 1, 12, stream), sent(r, 20, 500))
	a.Close()
	got := only(t, l.finished)
	assert.Equal(t, []string{IncompleteStopped}, got.Incomplete, "it was cut short by us, not by the server")
	assert.Equal(t, 200, got.Status)
}

// Whatever comes, in whatever order, the books balance.
func FuzzHandle(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 2, 4, 5, 0, 6})
	f.Fuzz(func(t *testing.T, script []byte) {
		var l log
		a := New(Config{MinDuration: ms}, &l)
		for i, b := range script {
			cookie, seq, at := uint64(b>>3&1), uint32(b>>4&1), uint64(10+i*int(b>>5))
			r := asked(cookie, seq, at, []string{get, post, "junk\r\n\r\n", ""}[i%4])
			switch b & 7 {
			case 0, 1:
				r.Flags.Continued = b&1 == 1
				r.Flags.Complete = i%3 != 0
				feed(a, r)
			case 2:
				feed(a, answered(cookie, seq, at, []string{ok, stream, "junk"}[i%3]))
			case 3, 4:
				p := sent(r, at, 40+i)
				p.LastChunk, p.Lost, p.NoLane = b&1 == 1, i%5 == 0, i%7 == 0
				p.Exclusive[stage.Lock] = int64(b)*ms - 99*ms
				p.Unacked = uint64(i%2) * 50 * ms
				feed(a, p)
			case 5:
				feed(a, stretch(cookie, thread, stage.PageFault, at-5, at))
			case 6:
				feed(a, &probe.Close{Socket: socket(cookie, seq, at), Drained: i%2 == 0, Final: i%3 == 0})
			case 7:
				feed(a, &probe.Tick{Now: at * ms}, resent(at+20, i%2 == 0, i%3 == 0))
			}
		}
		a.Close()
		if len(l.begun) != len(l.finished) {
			t.Fatalf("%d begun, %d finished", len(l.begun), len(l.finished))
		}
		for _, r := range l.finished {
			if r.Refused != "" {
				continue
			}
			var sum int64
			for s, v := range r.Exclusive {
				if v < 0 {
					t.Fatalf("%s %d", stage.Stage(s), v)
				}
				sum += v
			}
			if sum != int64(r.End-r.Start) {
				t.Fatalf("stages sum to %d of %d", sum, r.End-r.Start)
			}
		}
		if len(a.lanes) != 0 || len(a.held) != 0 || len(a.stalls) != 0 {
			t.Fatalf("left: lanes %v, stalls %v %v", a.lanes, a.held, a.stalls)
		}
		if len(l.problems) != 0 {
			t.Fatal(l.problems)
		}
	})
}

func TestWhatTheRequestWaitedForIsToldWithItsThread(t *testing.T) {
	var l log
	a := New(Config{MinDuration: ms}, &l)
	r := asked(1, 1, 10, get)
	p := sent(r, 30, len(ok)+2)
	p.Exclusive[stage.CPU] = 7 * ms
	p.Exclusive[stage.Lock] = 15 * ms
	p.Waker[stage.CPU], p.Waker[stage.Lock] = 7*ms, 15*ms
	feed(a, r, answered(1, 1, 12, ok),
		&probe.Occurrence{Socket: socket(1, 1, 28), PID: 70, TID: 71, Stage: stage.Lock, Start: 13 * ms, Duration: 15 * ms, Syscall: -1, Waker: true},
		&probe.Occurrence{Socket: socket(0, 0, 29), PID: 7, TID: 8, Lane: thread, Stage: stage.RunQueue, Start: 28 * ms, Duration: ms, Syscall: -1},
		p)
	settle(a)
	got := only(t, l.finished)
	assert.EqualValues(t, 15*ms, got.Waker[stage.Lock])
	assert.EqualValues(t, 6*ms, got.Exclusive[stage.CPU], "the reading had a millisecond too much")
	assert.EqualValues(t, 6*ms, got.Waker[stage.CPU], "the waker's part is never more than the whole")
	require.Len(t, l.occurrences, 2)
	assert.Equal(t, Occurrence{
		Key: got.Key, PID: 70, TID: 71, Stage: stage.Lock, Start: 13 * ms, End: 28 * ms, Duration: 15 * ms,
		Syscall: -1, SharedBy: 1, Others: []Key{}, Waker: true,
	}, l.occurrences[0])
	assert.EqualValues(t, 7, l.occurrences[1].PID)
	assert.False(t, l.occurrences[1].Waker)
}
