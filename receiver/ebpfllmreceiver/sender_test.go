//go:build linux && amd64

package ebpfllmreceiver

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/consumer/consumererror"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

// sink is a next component that answers as it is told. A batch is a list of
// numbers.
type sink struct {
	mu       sync.Mutex
	answers  []error // one for each delivery, then nil
	got      [][]int
	accepted int
	refused  int
	hold     chan struct{} // if set, deliveries wait for it or their context
}

// part is an error that leaves some of a batch to be tried again.
type part []int

func (part) Error() string { return "in part" }

func (s *sink) downstream() downstream[[]int] {
	return downstream[[]int]{
		consume: func(ctx context.Context, batch []int) error {
			if s.hold != nil {
				select {
				case <-s.hold:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			s.got = append(s.got, batch)
			if len(s.answers) == 0 {
				return nil
			}
			err := s.answers[0]
			s.answers = s.answers[1:]
			return err
		},
		begin: func(ctx context.Context) context.Context { return ctx },
		end: func(_ context.Context, items int, err error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			if err == nil {
				s.accepted += items
			} else {
				s.refused += items
			}
		},
		rest: func(err error, batch []int, items int) ([]int, int) {
			if p, ok := errors.AsType[part](err); ok {
				return p, len(p)
			}
			return batch, items
		},
	}
}

func startSender(s *sink, limit int) (*sender[[]int], *[]time.Duration, *observer.ObservedLogs) {
	core, logs := observer.New(zapcore.InfoLevel)
	out := newSender(zap.New(core), limit, s.downstream())
	var pauses []time.Duration
	out.after = func(d time.Duration) <-chan time.Time { // pauses pass at once
		pauses = append(pauses, d)
		c := make(chan time.Time, 1)
		c <- time.Time{}
		return c
	}
	return out, &pauses, logs
}

func TestSenderTriesAgainWhatIsRefusedForNow(t *testing.T) {
	busy := errors.New("busy")
	s := &sink{answers: []error{busy, busy}}
	out, pauses, logs := startSender(s, 10)
	require.True(t, out.send([]int{1, 2, 3}, 3))
	waitFor(t, func() bool { return out.held.Load() == 0 })
	require.NoError(t, out.stop(t.Context()))
	assert.Len(t, s.got, 3)
	assert.Equal(t, 3, s.accepted)
	assert.Zero(t, s.refused)
	assert.Equal(t, []time.Duration{firstPause, 2 * firstPause}, *pauses)
	assert.Zero(t, logs.Len())
}

func TestSenderTriesAgainOnlyWhatIsLeft(t *testing.T) {
	s := &sink{answers: []error{part{2, 3}}}
	out, _, _ := startSender(s, 10)
	require.True(t, out.send([]int{1, 2, 3}, 3))
	waitFor(t, func() bool { return out.held.Load() == 0 })
	require.NoError(t, out.stop(t.Context()))
	assert.Equal(t, [][]int{{1, 2, 3}, {2, 3}}, s.got)
	assert.Equal(t, 3, s.accepted)
}

func TestSenderDropsWhatIsRefusedForGood(t *testing.T) {
	s := &sink{answers: []error{consumererror.NewPermanent(errors.New("bad"))}}
	out, pauses, logs := startSender(s, 10)
	require.True(t, out.send([]int{1}, 1))
	require.True(t, out.send([]int{2}, 1))
	require.NoError(t, out.stop(t.Context()))
	assert.Equal(t, [][]int{{1}, {2}}, s.got, "the next batch is not held up")
	assert.Equal(t, 1, s.refused)
	assert.Equal(t, 1, s.accepted)
	assert.Empty(t, *pauses)
	assert.Equal(t, 1, logs.FilterMessageSnippet("lost").Len())
}

func TestSenderGivesUpAfterAWhile(t *testing.T) {
	s := &sink{answers: slices.Repeat([]error{errors.New("busy")}, maxTries+5)}
	out, pauses, logs := startSender(s, 10)
	require.True(t, out.send([]int{1}, 1))
	waitFor(t, func() bool { return out.held.Load() == 0 })
	require.NoError(t, out.stop(t.Context()))
	assert.Len(t, s.got, maxTries)
	assert.Equal(t, 1, s.refused)
	assert.Equal(t, maxPause, slices.Max(*pauses))
	assert.Equal(t, 1, logs.FilterMessageSnippet("lost").Len())
}

func TestSenderHoldsNoMoreThanItsLimitAndNeverWaits(t *testing.T) {
	s := &sink{hold: make(chan struct{})}
	out, _, _ := startSender(s, 5)
	require.True(t, out.send([]int{1, 2, 3}, 3))
	require.True(t, out.send([]int{4, 5}, 2))
	assert.False(t, out.send([]int{6}, 1))
	close(s.hold)
	waitFor(t, func() bool { return out.held.Load() == 0 })
	assert.True(t, out.send([]int{7}, 1))
	require.NoError(t, out.stop(t.Context()))
	assert.Equal(t, 6, s.accepted)
}

func TestSenderDeliversWhatItHoldsWhenStopped(t *testing.T) {
	s := &sink{answers: []error{errors.New("busy")}}
	out, _, _ := startSender(s, 100)
	for i := range 20 {
		require.True(t, out.send([]int{i}, 1))
	}
	require.NoError(t, out.stop(t.Context()))
	assert.Equal(t, 20, s.accepted+s.refused)
	assert.GreaterOrEqual(t, s.accepted, 19)
}

func TestSenderStopsWhenTheNextComponentHangs(t *testing.T) {
	s := &sink{hold: make(chan struct{})}
	out, _, _ := startSender(s, 5)
	require.True(t, out.send([]int{1}, 1))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, out.stop(ctx), context.Canceled)
	<-out.done
	assert.Equal(t, 1, s.refused)
}

func waitFor(t *testing.T, what func() bool) {
	t.Helper()
	require.Eventually(t, what, 20*time.Second, time.Millisecond)
}
