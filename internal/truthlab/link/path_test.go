//go:build linux

package link

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// segment is an IPv4 packet of a TCP segment that carries n bytes.
func segment(from, to uint16, n int) []byte {
	p := make([]byte, 40+n)
	p[0], p[9] = 0x45, 6
	binary.BigEndian.PutUint16(p[20:], from)
	binary.BigEndian.PutUint16(p[22:], to)
	p[32] = 5 << 4
	return p
}

// testPath is a path whose far end is a socket that keeps packets apart.
func testPath(t *testing.T, c Path) (p *path, received func() int) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = unix.Close(pair[0]), unix.Close(pair[1]) })
	buffer := make([]byte, maxPacket)
	return &path{Path: c, to: pair[0]}, func() int {
		n := 0
		for ; ; n++ {
			if _, err := unix.Read(pair[1], buffer); err != nil {
				return n
			}
		}
	}
}

var t0 = time.Unix(1000, 0)

func TestPacketsAreDueAfterDelayAndRate(t *testing.T) {
	// 1,000 bytes take 8 ms at 1 Mbit/s
	p, received := testPath(t, Path{Delay: 10 * time.Millisecond, Rate: 1e6})
	for range 3 {
		require.True(t, p.take(segment(1, 2, 960), t0))
	}
	for _, c := range []struct {
		at   time.Duration
		want int
	}{{0, 0}, {17 * time.Millisecond, 0}, {18 * time.Millisecond, 1}, {25 * time.Millisecond, 0}, {34 * time.Millisecond, 2}} {
		p.deliver(t0.Add(c.at))
		assert.Equal(t, c.want, received(), c.at)
	}
	assert.Equal(t, Stats{Packets: 3, Bytes: 3000}, p.stats)
	_, more := p.next(t0)
	assert.False(t, more)
	assert.Zero(t, p.queued)
}

func TestJitterKeepsTheOrder(t *testing.T) {
	p, received := testPath(t, Path{Jitter: 50 * time.Millisecond})
	for i := range 100 {
		p.take(segment(1, 2, 1), t0.Add(time.Duration(i)*time.Millisecond))
	}
	last := time.Time{}
	for _, q := range p.queue {
		assert.False(t, q.due.Before(last))
		last = q.due
	}
	p.deliver(t0.Add(149 * time.Millisecond))
	assert.Equal(t, 100, received())
}

func TestAFullBufferDrops(t *testing.T) {
	// at 1 Mbit/s: one packet is being sent and its bytes still wait, two more fit beside it
	p, _ := testPath(t, Path{Rate: 1e6, Buffer: 3000})
	for range 10 {
		p.take(segment(1, 2, 960), t0)
	}
	assert.Equal(t, 7, p.stats.Full)
	assert.Len(t, p.queue, 3)
	assert.True(t, p.take(segment(1, 2, 960), t0.Add(8*time.Millisecond)), "there is room again when one has gone")
}

func TestLossIsTheShareAskedFor(t *testing.T) {
	p, _ := testPath(t, Path{Loss: 0.2})
	for range 10000 {
		p.take(segment(1, 2, 1), t0)
	}
	assert.InDelta(t, 2000, p.stats.Lost, 300) // 7.5 standard deviations
	assert.Len(t, p.queue, 10000-p.stats.Lost)
}

func TestDropTakesOnlyDataOfItsPort(t *testing.T) {
	p, _ := testPath(t, Path{})
	p.dropPort, p.drop = 80, 2
	udp := segment(80, 9, 5)
	udp[9] = 17
	for _, c := range []struct {
		name string
		data []byte
		kept bool
	}{
		{"no data", segment(80, 9, 0), true},
		{"another port", segment(81, 9, 5), true},
		{"another protocol", udp, true},
		{"a stray piece", segment(80, 9, 5)[:19], false},
		{"not IPv4", append([]byte{0x60}, segment(80, 9, 5)[1:]...), false},
		{"too short for TCP", segment(80, 9, 5)[:30], true},
		{"from the port", segment(80, 9, 5), false},
		{"to the port", segment(9, 80, 5), false},
		{"when n are dropped", segment(80, 9, 5), true},
	} {
		assert.Equal(t, c.kept, p.take(c.data, t0), c.name)
	}
	assert.Equal(t, 2, p.stats.Chosen)
}

func TestAChangeLeavesWhatIsOnTheWay(t *testing.T) {
	p, received := testPath(t, Path{Delay: 50 * time.Millisecond})
	p.take(segment(1, 2, 1), t0)
	p.Path = Path{}
	p.take(segment(1, 2, 1), t0)
	p.deliver(t0.Add(49 * time.Millisecond))
	assert.Zero(t, received(), "a later packet does not overtake")
	p.deliver(t0.Add(50 * time.Millisecond))
	assert.Equal(t, 2, received())
}
