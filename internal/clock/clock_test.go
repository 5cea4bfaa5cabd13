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

	for _, change := range []time.Duration{time.Microsecond, -time.Hour, 8 * time.Hour} {
		m.wall += int64(change) // the wall clock alone moves
		require.NoError(t, c.Refresh(m.mono))
		assert.Equal(t, start, c.Offset(), "a young sample stays")

		m.pass(Interval)
		require.NoError(t, c.Refresh(m.mono))
		start += Offset(change)
		assert.Equal(t, start, c.Offset())
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
