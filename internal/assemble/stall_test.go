package assemble

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// before is a stretch of the reader's that a request's own connection is told of.
func before(cookie uint64, s stage.Stage, from, to uint64) *probe.Occurrence {
	return stretch(cookie, probe.Lane{}, s, from, to)
}

// arrived is a request that lay readable from one time in ms and was read at another.
func arrived(cookie, from, read uint64) *probe.RequestHead {
	r := asked(cookie, 1, read, get)
	r.Start = from * ms
	return r
}

// whole is the answer to a request, complete at a time.
func whole(r *probe.RequestHead, at uint64) []probe.Event {
	return []probe.Event{answered(r.Cookie, r.Seq, at, ok), sent(r, at, len(ok)+2)}
}

func ended(r *probe.RequestHead, at uint64) func(a *Assembler) {
	return func(a *Assembler) { feed(a, whole(r, at)...) }
}

// told feeds events; heads, which are wiped once read, as copies.
func told(events ...probe.Event) func(a *Assembler) {
	return func(a *Assembler) {
		for _, e := range events {
			if r, ok := e.(*probe.RequestHead); ok {
				head := *r
				head.Bytes = slices.Clone(r.Bytes)
				e = &head
			}
			feed(a, e)
		}
	}
}

func TestAStallIsSharedByExactlyThoseInFlightDuringIt(t *testing.T) {
	one, two, three := arrived(1, 9, 10), arrived(2, 10, 11), arrived(3, 11, 12)
	for _, c := range []struct {
		name string
		do   []func(a *Assembler)
		want []string
	}{
		{"three in flight", []func(*Assembler){told(one, two, three, stretch(0, thread, stage.Lock, 20, 80))}, []string{
			"1 lock 20-80/3 with 2 3", "2 lock 20-80/3 with 3 1", "3 lock 20-80/3 with 1 2",
		}},
		{"one that ended before is not", []func(*Assembler){told(one, two, three), ended(three, 15), told(stretch(0, thread, stage.Lock, 20, 80))}, []string{
			"1 lock 20-80/2 with 2", "2 lock 20-80/2 with 1",
		}},
		{"one that began after is not", []func(*Assembler){told(one, two, stretch(0, thread, stage.Lock, 20, 80), arrived(3, 80, 81))}, []string{
			"1 lock 20-80/2 with 2", "2 lock 20-80/2 with 1",
		}},
		{"alone it is not shared", []func(*Assembler){told(one), ended(one, 15), told(two, stretch(0, thread, stage.Lock, 20, 80), arrived(3, 80, 81))}, []string{
			"2 lock 20-80/1 with",
		}},
		{"one that has ended before it, as is known only later", []func(*Assembler){told(one, two, answered(2, 1, 14, "HTTP/1.0 200 OK\r\n\r\n"), sent(two, 15, 30), stretch(0, thread, stage.Lock, 20, 80), &probe.Close{Socket: socket(2, 1, 90), Drained: true, Final: true})}, []string{
			"1 lock 20-80/1 with",
		}},
		{"one that ended in the midst of it has its part", []func(*Assembler){told(one, two, answered(2, 1, 14, "HTTP/1.0 200 OK\r\n\r\n"), sent(two, 50, 30), stretch(0, thread, stage.Lock, 20, 80), &probe.Close{Socket: socket(2, 1, 90), Drained: true, Final: true})}, []string{
			"1 lock 20-80/2 with 2", "2 lock 20-50/2 with 1",
		}},
		{"those that are answered at once afterwards too", []func(*Assembler){told(one, two, stretch(0, thread, stage.Lock, 20, 80)), ended(one, 81), ended(two, 82)}, []string{
			"1 lock 20-80/2 with 2", "2 lock 20-80/2 with 1",
		}},
		{"those that lay unread, from their arrival", []func(*Assembler){told(one, stretch(0, thread, stage.Stopped, 20, 80)), ended(one, 81), told(
			before(2, stage.Stopped, 30, 80), arrived(2, 30, 82), before(3, stage.Stopped, 40, 80), arrived(3, 40, 90))}, []string{
			"1 stopped 20-80/3 with 2 3", "2 stopped 30-80/3 with 3 1", "3 stopped 40-80/3 with 1 2",
		}},
		{"none was read", []func(*Assembler){told(before(2, stage.RunQueue, 30, 80), arrived(2, 30, 82), before(3, stage.RunQueue, 40, 80), arrived(3, 40, 90))}, []string{
			"2 run_queue 30-80/2 with 3", "3 run_queue 40-80/2 with 2",
		}},
		{"another stall of the thread is another", []func(*Assembler){told(before(2, stage.RunQueue, 30, 40), before(2, stage.RunQueue, 50, 80), arrived(2, 30, 82), before(3, stage.RunQueue, 60, 80), arrived(3, 60, 90))}, []string{
			"2 run_queue 30-40/1 with", "2 run_queue 50-80/2 with 3", "3 run_queue 60-80/2 with 2",
		}},
		{"a process that is stopped as a whole, and what its threads had not read", []func(*Assembler){told(one, stretch(0, probe.Lane{}, stage.Stopped, 20, 80), onThread(99, before(2, stage.Stopped, 30, 81)), arrived(2, 30, 82), onThread(98, before(3, stage.Stopped, 40, 80)), arrived(3, 40, 90))}, []string{
			"1 stopped 20-80/3 with 2 3", "2 stopped 30-81/3 with 3 1", "3 stopped 40-80/3 with 1 2",
		}},
		{"a socket's own stage never", []func(*Assembler){told(one, two, before(1, stage.SendBuffer, 20, 80), before(2, stage.SendBuffer, 20, 80))}, []string{
			"1 send_buffer 20-80/1 with", "2 send_buffer 20-80/1 with",
		}},
		{"a part that is too short for a span is no part", []func(*Assembler){told(one, two, before(2, stage.SendBuffer, 20, 80), stretch(0, thread, stage.Lock, 20, 80))}, []string{
			"2 send_buffer 20-80/1 with", "1 lock 20-80/1 with",
		}},
		{"one of which no account can be given is no other's companion", []func(*Assembler){told(one, two, stretch(0, thread, stage.Lock, 20, 80), answered(2, 1, 81, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"), sent(two, 82, 80))}, []string{
			"1 lock 20-80/1 with",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var l log
			a := New(Config{MinDuration: ms}, &l)
			for _, do := range c.do {
				do(a)
			}
			settle(a)
			var got []string
			for i, o := range l.occurrences {
				with := ""
				for _, k := range o.Others {
					with += fmt.Sprintf(" %d", k.Cookie)
				}
				got = append(got, spans(&l)[i]+" with"+with)
			}
			assert.Equal(t, c.want, got)
			assert.Empty(t, l.problems)
			a.Close()
			assert.Len(t, l.finished, len(l.begun))
			assert.Empty(t, a.held)
			assert.Empty(t, a.stalls)
		})
	}
}

func onThread(tid uint32, e *probe.Occurrence) *probe.Occurrence {
	e.TID = tid
	return e
}

// What comes later could still belong to it; but nobody waits for ever.
func TestAStallAndTheRequestsItDelayedAreHeldForAWhile(t *testing.T) {
	var l log
	a := New(Config{MinDuration: ms}, &l)
	one := asked(1, 1, 10, get)
	feed(a, one, stretch(0, thread, stage.RunQueue, 20, 80))
	feed(a, whole(one, 81)...)
	tick := func(at uint64) { feed(a, &probe.Tick{Now: at * ms}) }
	tick(80 + Settle/ms - 1)
	assert.Empty(t, l.occurrences)
	assert.Empty(t, l.finished)
	tick(80 + Settle/ms)
	assert.Len(t, l.occurrences, 1)
	assert.Len(t, l.finished, 1)

	// each that is found puts it off, up to a bound
	feed(a, asked(2, 1, 1000, get), stretch(0, thread, stage.RunQueue, 1100, 1200))
	for i := range uint64(12) {
		feed(a, before(100+i, stage.RunQueue, 1110, 1200), arrived(100+i, 1110, 1200+(i+1)*100))
		tick(1200 + (i+1)*100)
	}
	require.Len(t, l.occurrences, 1+1+maxSettleTicks)
	assert.Equal(t, 1+maxSettleTicks, l.occurrences[1].SharedBy)
	settle(a)
	assert.Empty(t, l.problems)
	assert.Len(t, l.occurrences, 1+1+12, "what was found later has spans all the same")
}

// maxSettleTicks of 100 ms there are until MaxSettle is over.
const maxSettleTicks = int((MaxSettle + 100*ms - 1) / (100 * ms))

func TestLinksAndStallsAreBounded(t *testing.T) {
	var l log
	a := New(Config{MinDuration: ms}, &l)
	const n = 100
	for i := range uint64(n) {
		feed(a, asked(1+i, 1, 10, get))
	}
	feed(a, stretch(0, thread, stage.Lock, 20, 80))
	settle(a)
	named := map[Key]int{}
	for _, o := range l.occurrences {
		assert.Equal(t, n, o.SharedBy)
		assert.Len(t, o.Others, MaxOthers)
		for _, k := range o.Others {
			named[k]++
		}
	}
	assert.Len(t, named, n, "each is named by some")
	for k, times := range named {
		assert.Equal(t, MaxOthers, times, k)
	}
	for i := range uint64(2 * MaxStalls) {
		feed(a, onThread(uint32(i), before(1, stage.RunQueue, 100+2*i, 101+2*i)))
	}
	assert.Len(t, a.held, MaxStalls)
	a.Close()
	assert.Empty(t, a.stalls)
	assert.Empty(t, l.problems)
}
