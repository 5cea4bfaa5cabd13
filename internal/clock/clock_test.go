package clock

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// machine is a pair of clocks that move only when told.
type machine struct {
	mono, delay uint64 // delay passes between any two readings
	wall        int64
	err         error
}

func (m *machine) pass(d time.Duration) { m.mono += uint64(d); m.wall += int64(d) }

func (m *machine) source() Source {
	return Source{
		Monotonic: func() (uint64, error) { m.pass(time.Duration(m.delay)); return m.mono, m.err },
		Wall:      func() (int64, error) { m.pass(time.Duration(m.delay)); return m.wall, m.err },
	}
}

func TestOffsetConvertsToWallTime(t *testing.T) {
	m := &machine{mono: 5_000, wall: 1_700_000_000_000_000_000, delay: 10}
	c, err := New(m.source())
	require.NoError(t, err)
	assert.Equal(t, Offset(1_700_000_000_000_000_000-5_000), c.Offset())
	assert.Equal(t, uint64(1_700_000_000_000_000_000), c.Offset().Unix(5_000))
}

func TestRefreshFollowsASlewAStepAndASleep(t *testing.T) {
	m := &machine{mono: 1_000, wall: 1_000_000}
	c, err := New(m.source())
	require.NoError(t, err)
	start := c.Offset()

	for _, change := range []time.Duration{time.Microsecond, 2 * time.Millisecond, -time.Hour, 8 * time.Hour} {
		m.wall += int64(change) // the wall clock alone moves
		require.NoError(t, c.Refresh(m.mono))
		if change.Abs() < step {
			assert.Equal(t, start, c.Offset(), "a young sample stays")
			m.pass(Interval)
			require.NoError(t, c.Refresh(m.mono))
		}
		start += Offset(change)
		assert.Equal(t, start, c.Offset(), "a step is seen at once")
	}
}

func TestAnOffsetTakenBeforeAStepStaysConsistent(t *testing.T) {
	m := &machine{mono: 1_000, wall: int64(time.Hour)}
	c, err := New(m.source())
	require.NoError(t, err)
	taken := c.Offset()
	begin := taken.Unix(m.mono)
	m.wall -= int64(time.Minute)
	m.pass(Interval)
	require.NoError(t, c.Refresh(m.mono))
	assert.Equal(t, begin+uint64(Interval), taken.Unix(m.mono))
	assert.Less(t, c.Offset().Unix(m.mono), begin)
}

func TestTheTightestReadingWins(t *testing.T) {
	m := &machine{mono: 0, wall: int64(time.Hour)}
	n := 0
	s := m.source()
	wall := s.Wall
	s.Wall = func() (int64, error) {
		w, err := wall()
		if n++; n != 3 {
			m.pass(time.Second) // preempted between the readings
		}
		return w, err
	}
	c, err := New(s)
	require.NoError(t, err)
	assert.Equal(t, Offset(time.Hour), c.Offset())
}

func TestAFailedReadingKeepsTheSample(t *testing.T) {
	m := &machine{mono: 1, wall: 2}
	c, err := New(m.source())
	require.NoError(t, err)
	m.err = errors.New("no clock")
	require.ErrorIs(t, c.Refresh(uint64(time.Hour)), m.err)
	assert.Equal(t, Offset(1), c.Offset())

	_, err = New(m.source())
	require.ErrorIs(t, err, m.err)
}

func TestUnixIsNeverBefore1970(t *testing.T) {
	assert.Zero(t, Offset(-100).Unix(50))
}

// adjtime and NTP slew by at most 500 ppm. The kernel slews CLOCK_MONOTONIC and CLOCK_REALTIME alike, so that nothing is
// to be seen of it here; even if one of them alone ran off so fast, no time would be off by more than what that makes
// between two samples, and no duration by more than that share of it.
func TestASlewIsFollowedWithinAMillisecond(t *testing.T) {
	for _, ppm := range []int64{500, -500} {
		m := &machine{mono: 1_000, wall: 1_700_000_000_000_000_000}
		c, err := New(m.source())
		require.NoError(t, err)
		const tick = 25 * time.Millisecond // how often the receiver asks for a refresh
		for range time.Hour / tick {
			m.mono += uint64(tick)
			m.wall += int64(tick) * (1_000_000 + ppm) / 1_000_000
			require.NoError(t, c.Refresh(m.mono))
			off := int64(c.Offset().Unix(m.mono)) - m.wall
			require.LessOrEqual(t, max(off, -off), int64(time.Millisecond)+int64(tick)/2000)
		}
	}
}

// No counter of 32 bits is among them: 49.7 days are 2^32 ms, 24.8 days half of it, and 71 minutes 2^32 µs.
func TestAMachineThatIsUpForYearsConvertsExactly(t *testing.T) {
	const day = uint64(24 * time.Hour)
	for _, up := range []uint64{day, 1 << 32 * 1_000, 1 << 31 * uint64(time.Millisecond), 1 << 32 * uint64(time.Millisecond), 497 * day, 30 * 365 * day} {
		for _, around := range []uint64{up - 1, up, up + 1} {
			m := &machine{mono: around, wall: 1_700_000_000_000_000_000, delay: 0}
			c, err := New(m.source())
			require.NoError(t, err)
			assert.Equal(t, uint64(m.wall), c.Offset().Unix(around))
			assert.Equal(t, uint64(m.wall)+day, c.Offset().Unix(around+day))
			require.NoError(t, c.Refresh(around+uint64(Interval)))
		}
	}
}
