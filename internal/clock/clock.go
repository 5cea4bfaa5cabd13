// Package clock converts the kernel's CLOCK_MONOTONIC timestamps to wall time.
//
// The two clocks drift apart: the wall clock is stepped and slewed, and the
// monotonic one stands still while the machine sleeps. So the offset between
// them is sampled again every few seconds, and at once after a step. Whoever converts several instants of
// one thing takes one Offset and uses it for all of them: a step of the wall
// clock in between then cannot turn a duration around.
package clock

import (
	"errors"
	"sync/atomic"
	"time"
)

// Interval is how old a sample may grow before Refresh takes a new one.
const Interval = 2 * time.Second

// Source reads both clocks: monotonic nanoseconds (CLOCK_MONOTONIC) and wall
// nanoseconds since 1970 (CLOCK_REALTIME).
type Source struct {
	Monotonic func() (uint64, error)
	Wall      func() (int64, error)
}

// Clock holds the latest offset. It may be read from several goroutines.
type Clock struct {
	source Source
	latest atomic.Pointer[sample]
}

type sample struct {
	offset Offset
	at     uint64 // monotonic nanoseconds
}

// Offset is what to add to monotonic nanoseconds to have nanoseconds since 1970.
type Offset int64

// Unix converts monotonic nanoseconds to nanoseconds since 1970, which are 0 at
// the least.
func (o Offset) Unix(mono uint64) uint64 {
	return uint64(max(0, int64(mono)+int64(o)))
}

// New samples the clocks of source for the first time.
func New(source Source) (*Clock, error) {
	c := &Clock{source: source}
	return c, c.resample()
}

// Offset returns the latest sample.
func (c *Clock) Offset() Offset { return c.latest.Load().offset }

// step is by how much the clocks must part at once to be sampled again before
// Interval is over.
const step = time.Millisecond

// Refresh takes a new sample if the latest is older than Interval at the given
// monotonic time, or if the wall clock was stepped since, or the machine slept.
// On an error the earlier sample stays.
func (c *Clock) Refresh(mono uint64) error {
	latest := c.latest.Load()
	if mono >= latest.at+uint64(Interval) {
		return c.resample()
	}
	now, err1 := c.source.Monotonic()
	wall, err2 := c.source.Wall()
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	if d := time.Duration(wall - int64(now) - int64(latest.offset)); d.Abs() < step {
		return nil
	}
	return c.resample()
}

// resample reads the wall clock between two readings of the monotonic one, five
// times over, and keeps the tightest of them: a preemption in between makes a
// sample wide and wrong by up to half its width.
func (c *Clock) resample() error {
	var best sample
	width := uint64(1<<64 - 1)
	for range 5 {
		before, err1 := c.source.Monotonic()
		wall, err2 := c.source.Wall()
		after, err3 := c.source.Monotonic()
		if err := errors.Join(err1, err2, err3); err != nil {
			return err
		}
		if w := after - before; after >= before && w < width {
			width = w
			best = sample{Offset(wall - int64(before+w/2)), after}
		}
	}
	if width == 1<<64-1 {
		return errors.New("the monotonic clock ran backwards")
	}
	c.latest.Store(&best)
	return nil
}
