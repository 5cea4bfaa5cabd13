package baseline

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestASavedBookJudgesLikeTheOneItWasSavedFrom(t *testing.T) {
	b := book(nil)
	learn(b.Group("svc", "chat").Series("lock", true), 300, 0.01)
	for range 20 {
		b.Group("svc", "chat").Series("lock", true).Defer(0.5)
		b.Group("svc", "chat").Series("lock", true).Exclude(0.7)
	}
	b.Step(epoch.Add(slice))
	learn(b.Group("svc", "chat").Series("cpu", false), 300, 0.2)
	learn(b.Group("svc", "chat").Series("lock", true), 10, 0.02)

	later := epoch.Add(slice + time.Minute)
	restored := New(b.cfg, later)
	require.NoError(t, restored.SetClock(b.Clock(), later))
	for _, k := range b.Keys() {
		data, err := b.Save(k)
		require.NoError(t, err)
		require.NotNil(t, data)
		require.NoError(t, restored.Load(data))
		again, err := b.Save(k)
		require.NoError(t, err)
		assert.Nil(t, again, "nothing has changed")
		for _, bad := range [][]byte{nil, data[:len(data)/2], append([]byte("x"), data...)} {
			require.ErrorIs(t, New(b.cfg, later).Load(bad), ErrDamaged)
		}
	}
	for _, stage := range []string{"lock", "cpu"} {
		for _, op := range []string{"chat", "new"} {
			was := b.Group("svc", op).Series(stage, true).Judge(0.1, true)
			assert.Equal(t, was, restored.Group("svc", op).Series(stage, true).Judge(0.1, true), "%s %s", op, stage)
		}
	}
	// It goes on from where it was: the spikes that were left out count on.
	assert.Equal(t, b.Step(epoch.Add(2*slice)), restored.Step(epoch.Add(2*slice)))
	learn(b.Group("svc", "chat").Series("lock", true), 1, 0.01)
	data, err := b.Save(Key{"svc", "chat"})
	require.NoError(t, err)
	assert.NotNil(t, data, "changed")
}

func TestARestoredBookIsNoOlderThanItsWindow(t *testing.T) {
	b := book(nil)
	learn(b.Group("svc", "chat").Series("lock", true), 300, 0.01)
	data, err := b.Save(Key{"svc", "chat"})
	require.NoError(t, err)
	for down, want := range map[time.Duration]State{time.Minute: Own, 25 * time.Minute: Own, 2 * time.Hour: None} {
		t.Run(fmt.Sprint("down for ", down), func(t *testing.T) {
			now := epoch.Add(down)
			r := New(b.cfg, now)
			require.NoError(t, r.SetClock(b.Clock(), now))
			require.NoError(t, r.Load(data))
			r.Step(now)
			assert.Equal(t, want, r.Group("svc", "chat").Series("lock", true).Judge(0.1, false).State)
		})
	}
	require.ErrorContains(t, New(b.cfg, epoch).SetClock(Clock{time.Hour, epoch, 9}, epoch), "a window of 1h0m0s, not 30m0s")
}
