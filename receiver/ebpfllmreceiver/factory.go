package ebpfllmreceiver

import (
	"go.opentelemetry.io/collector/receiver"

	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver/internal/metadata"
)

// NewFactory returns the factory of the ebpfllm receiver.
func NewFactory() receiver.Factory {
	return receiver.NewFactory(
		metadata.Type,
		createDefaultConfig,
		receiver.WithTraces(createTraces, metadata.TracesStability),
		receiver.WithMetrics(createMetrics, metadata.MetricsStability),
	)
}
