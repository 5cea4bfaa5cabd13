//go:build linux

package link

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// segment is an IPv4 packet of a TCP segment.
func segment(data string) []byte {
	p := make([]byte, 40, 40+len(data))
	p[0], p[9] = 0x45, unix.IPPROTO_TCP
	p[32] = 5 << 4
	return append(p, data...)
}

// kilobyte is a packet of 1,000 bytes.
var kilobyte = segment(strings.Repeat("x", 960))

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
		require.True(t, p.take(kilobyte, t0))
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

func TestOthersOccupyTheNarrowPlace(t *testing.T) {
	p, received := testPath(t, Path{Rate: 1e6, Buffer: 3000})
	p.occupy(1000, t0) // 8 ms
	p.occupy(1000, t0)
	require.True(t, p.take(kilobyte, t0))
	assert.False(t, p.take(kilobyte, t0), "they take room in the buffer, too")
	p.deliver(t0.Add(23 * time.Millisecond))
	assert.Zero(t, received())
	p.deliver(t0.Add(24 * time.Millisecond))
	assert.Equal(t, 1, received())
}

func TestJitterKeepsTheOrder(t *testing.T) {
	p, received := testPath(t, Path{Jitter: 50 * time.Millisecond})
	for i := range 100 {
		p.take(segment("x"), t0.Add(time.Duration(i)*time.Millisecond))
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
		p.take(kilobyte, t0)
	}
	assert.Equal(t, 7, p.stats.Full)
	assert.Len(t, p.queue, 3)
	assert.True(t, p.take(kilobyte, t0.Add(8*time.Millisecond)), "there is room again when one has gone")
}

func TestLossIsTheShareAskedFor(t *testing.T) {
	p, _ := testPath(t, Path{Loss: 0.2})
	for range 10000 {
		p.take(segment("x"), t0)
	}
	assert.InDelta(t, 2000, p.stats.Lost, 300) // 7.5 standard deviations
	assert.Len(t, p.queue, 10000-p.stats.Lost)
}

func TestDropTakesWhatItNamesOnce(t *testing.T) {
	p, _ := testPath(t, Path{})
	p.drops = []drop{{[]byte("needle"), 2}, {[]byte("pin"), 1}}
	udp := segment("needle")
	udp[9] = unix.IPPROTO_UDP
	options := segment("needle") // are the head's
	options[32] = 7 << 4
	for _, c := range []struct {
		name string
		data []byte
		kept bool
	}{
		{"no data", segment(""), true},
		{"other data", segment("haystack"), true},
		{"another protocol", udp, true},
		{"in the head", options, true},
		{"a head longer than the packet", append(segment("")[:32], 0xf0, 0, 0, 0, 0, 0, 0, 0), true},
		{"a stray piece", segment("needle")[:19], false},
		{"not IPv4", append([]byte{0x60}, segment("needle")[1:]...), false},
		{"too short for TCP", segment("needle")[:30], true},
		{"named", segment("a needle here"), false},
		{"named too", segment("pin"), false},
		{"named again", segment("needle"), false},
		{"when n are dropped", segment("needle, pin"), true},
	} {
		assert.Equal(t, c.kept, p.take(c.data, t0), c.name)
	}
	assert.Equal(t, 3, p.stats.Chosen)
}

func TestAChangeLeavesWhatIsOnTheWay(t *testing.T) {
	p, received := testPath(t, Path{Delay: 50 * time.Millisecond})
	p.take(segment("x"), t0)
	p.Path = Path{}
	p.take(segment("x"), t0)
	p.deliver(t0.Add(49 * time.Millisecond))
	assert.Zero(t, received(), "a later packet does not overtake")
	p.deliver(t0.Add(50 * time.Millisecond))
	assert.Equal(t, 2, received())
}
