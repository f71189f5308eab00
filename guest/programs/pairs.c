/*
 * Has a network card use a pair of queues for each processor, as far as it has them:
 * the kernel decides when its driver starts, when processors that come up later are
 * not there yet.
 *
 *   pairs CARD
 *
 * Prints `pairs CARD N`. Ends with 1 when the card cannot be asked, which is so of
 * cards with one pair.
 */

#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int count, char **words)
{
	struct ethtool_channels channels = { .cmd = ETHTOOL_GCHANNELS };
	struct ifreq request = { .ifr_data = (void *)&channels };
	long processors = sysconf(_SC_NPROCESSORS_ONLN);
	int handle = socket(AF_INET, SOCK_DGRAM, 0);

	if (count != 2 || strlen(words[1]) >= sizeof(request.ifr_name)) {
		fprintf(stderr, "pairs CARD\n");
		return 2;
	}
	strcpy(request.ifr_name, words[1]);
	if (handle < 0 || ioctl(handle, SIOCETHTOOL, &request) || channels.max_combined < 2)
		return 1;
	channels.combined_count = channels.max_combined;
	if (processors > 0 && processors < channels.combined_count)
		channels.combined_count = (unsigned int)processors;
	channels.cmd = ETHTOOL_SCHANNELS;
	if (ioctl(handle, SIOCETHTOOL, &request)) {
		perror("pairs");
		return 1;
	}
	printf("pairs %s %u\n", words[1], channels.combined_count);
	return 0;
}
