package assemble

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// The end of a request and its connection's are lost: for all that is known here,
// it goes on.
func TestAfterALossNobodySharesWithWhatMayBeOver(t *testing.T) {
	var l log
	a := New(Config{MinDuration: ms}, &l)
	phantom := asked(1, 1, 10, get)
	alive := asked(2, 1, 11, get)
	feed(a, phantom, alive, answered(2, 1, 12, stream), sent(alive, 20, 200))
	a.Lost(30 * ms)
	again := sent(alive, 40, 300)
	again.Chunks = 2
	feed(a, again)

	feed(a, asked(3, 1, 50, get), stretch(0, thread, stage.Lock, 60, 90))
	settle(a)
	assert.Equal(t, []string{"2 lock 60-90/2", "3 lock 60-90/2"}, spans(&l), "those that were heard of since")
	assert.Equal(t, 2, a.conns[3].request.SharedBy)
	assert.Contains(t, a.conns[1].request.problems, IncompleteLost, "it may lack the stall")
	assert.Empty(t, a.conns[2].request.problems)
	assert.Empty(t, l.problems)
}

func TestARequestThatIsHeardOfAgainIsACompanionAgain(t *testing.T) {
	var l log
	a := New(Config{MinDuration: ms}, &l)
	slow := asked(1, 1, 10, get)
	feed(a, slow)
	a.Lost(30 * ms)
	feed(a, asked(2, 1, 50, get))
	assert.Equal(t, 1, a.conns[2].request.SharedBy)
	feed(a, answered(1, 1, 55, stream), sent(slow, 60, 200), stretch(0, thread, stage.Lock, 70, 90))
	settle(a)
	assert.Equal(t, []string{"1 lock 70-90/2", "2 lock 70-90/2"}, spans(&l))
	for _, cookie := range []uint64{1, 2} {
		assert.Equal(t, 2, a.conns[cookie].request.SharedBy)
		assert.Empty(t, a.conns[cookie].request.problems, "it lacks nothing")
	}
}

func TestAStallOfAProcessIsNotSharedWithWhatMayBeOver(t *testing.T) {
	var l log
	a := New(Config{MinDuration: ms}, &l)
	feed(a, asked(1, 1, 10, get))
	a.Lost(30 * ms)
	feed(a, asked(2, 1, 50, get), stretch(0, probe.Lane{}, stage.Stopped, 60, 90))
	settle(a)
	assert.Equal(t, []string{"2 stopped 60-90/1"}, spans(&l))
}

func TestWhatMayBeOverIsForgottenSooner(t *testing.T) {
	for _, c := range []struct {
		name  string
		given func() []probe.Event
		heard uint64 // ms
		after uint64 // nanoseconds
	}{
		{"an idle connection", func() []probe.Event { r := asked(1, 1, 10, get); return append([]probe.Event{r}, whole(r, 20)...) }, 20, idleAfter},
		{"a request without an answer", func() []probe.Event { return []probe.Event{asked(1, 1, 10, get)} }, 10, doubtfulAfter},
		{"one that is not followed", func() []probe.Event { return []probe.Event{asked(1, 1, 10, "\x16\x03\x01\x02\r\n\r\n")} }, 10, doubtfulAfter},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, lost := range []bool{false, true} {
				var l log
				a := New(Config{}, &l)
				feed(a, c.given()...)
				feed(a, &probe.Tick{Now: 30 * ms})
				if lost {
					a.Lost(30 * ms)
				}
				feed(a, &probe.Tick{Now: c.heard*ms + c.after - 1})
				assert.Len(t, a.conns, 1)
				feed(a, &probe.Tick{Now: 30*ms + c.after + StaleAfter/60})
				if lost {
					assert.Empty(t, a.conns)
					assert.Empty(t, a.lanes)
				} else {
					assert.Len(t, a.conns, 1)
				}
				assert.Len(t, l.finished, len(l.begun)-a.InFlight())
			}
		})
	}
}

// An overload of short connections leaves many whose end is not known: they
// take nobody's place.
func TestConnectionsThatMayBeOverMakeRoomForOthers(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	for i := range uint64(MaxConnections) {
		r := asked(1+i, 1, 10, get)
		r.Lane.ID = i
		feed(a, r)
	}
	next := func(at uint64) {
		n := len(l.begun)
		feed(a, asked(1<<20+at, 1, at, get))
		if len(l.begun) == n {
			require.Len(t, a.conns, MaxConnections)
		}
	}
	next(60_000)
	assert.Len(t, l.begun, MaxConnections, "nothing was lost: all of them are there")
	a.Lost(60_000 * ms)
	next(60_001)
	assert.Len(t, l.begun, MaxConnections+1)
	assert.Len(t, l.finished, MaxConnections)
	assert.Len(t, a.conns, 1)
	assert.EqualValues(t, 1, a.Unparsed()["too_many_connections"])
}
